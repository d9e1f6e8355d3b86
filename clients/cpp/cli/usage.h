// What to say of a wrong command line.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

namespace spillway::cli {

// The message for an error of app.parse(): where a word is no command, that
// word and the command nearest to it; else the parser's own.
std::string UsageMessage(const CLI::App& app, const CLI::ParseError& error);

}  // namespace spillway::cli
