// Messages for a wrong command line.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace spillway::cli {

// The message for an error of app.parse(). If a word is not a command, the message names this word
// and the most similar command, or all commands. Otherwise it names an unknown option, or is the
// parser's own message.
std::string UsageMessage(const CLI::App& app, const CLI::ParseError& error);

}  // namespace spillway::cli
