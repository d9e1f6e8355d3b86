// Holds the K/V of one layer on a CPU device and runs one measurement per request, so that a driver
// can alternate between this program and its competitors. Reads one JSON object per line from
// standard input and answers each with one line:
//   {"op": "read", "token_count": n}    plain parallel read of the rows of the first n tokens, from
//                                       cold caches
//   {"op": "attend", "selector": "all" | "default", "query": i, "visible": n,
//    "out": path or absent}             one attend; writes the output [H_q][d] fp32 to the file
//   {"op": "flush"}                     empty the caches
//   {"op": "memory"}                    bytes of rows, of codes, and used of the budget
// The answer to a request that fails is {"error": text}. The program ends at the end of its input.
#include <exception>
#include <fstream>
#include <iostream>
#include <string>
#include <utility>

#include "absl/strings/str_cat.h"
#include "bench/cpu/fixture.h"
#include "bench/mapped_file.h"
#include "bench/trace_files.h"
#include "nlohmann/json.hpp"

namespace spillway::bench {
namespace {

using Json = nlohmann::ordered_json;

absl::StatusOr<Json> Attend(Fixture& fixture, const MappedFile& queries, const Json& request) {
  const ModelSpec& spec = fixture.model().spec();
  Policy policy = DefaultPolicy(spec);
  if (request.at("selector") == "all") policy.selector = Selector::kAll;
  const int64_t query_floats = int64_t{spec.query_head_count} * spec.head_dim;
  const int64_t query = request.at("query");
  if (query < 0 || (query + 1) * query_floats * 4 > queries.bytes()) {
    return absl::OutOfRangeError(absl::StrCat("no query ", query));
  }
  const auto* q = reinterpret_cast<const float*>(queries.data()) + query * query_floats;
  absl::StatusOr<Fixture::Attended> result = fixture.Attend(policy, q, request.at("visible"));
  if (!result.ok()) return result.status();
  if (request.contains("out")) {
    std::ofstream file(request["out"].get<std::string>(), std::ios::binary);
    file.write(reinterpret_cast<const char*>(result->result.out.data()),
               static_cast<std::streamsize>(result->result.out.size() * sizeof(float)));
    if (!file.flush()) return absl::InternalError("cannot write the output");
  }
  Json errors = Json::array();
  for (const Certificate& c : result->result.certificates) errors.push_back(c.relative_error);
  return Json{{"us", result->device_time_us},
              {"touched_row_counts", result->result.touched_row_counts},
              {"certified_errors", std::move(errors)}};
}

absl::StatusOr<Json> Answer(Fixture& fixture, const MappedFile& queries, CacheFlush& flush,
                            const Json& request) {
  const std::string op = request.at("op");
  if (op == "flush") {
    flush.Run();
    return Json::object();
  }
  if (op == "attend") return Attend(fixture, queries, request);
  if (op == "read") return Json{{"us", 1e6 * fixture.ReadRows(request.at("token_count"), flush)}};
  if (op == "memory") {
    return Json{{"row_bytes", fixture.rows().bytes()},
                {"index_bytes", fixture.sequence().index_bytes()},
                {"used_bytes", fixture.budget().used_bytes()},
                {"huge_page_bytes", fixture.arena().statistics().huge_page_bytes}};
  }
  return absl::InvalidArgumentError(absl::StrCat("unknown op ", op));
}

absl::Status Serve(const std::string& directory) {
  const auto files = TraceFiles::Open(directory);
  if (!files.ok()) return files.status();
  const auto& [meta, spec, tokens, k, v, queries] = *files;
  auto fixture = Fixture::Create(spec, 0, 2 * (k.bytes() + v.bytes()) + (int64_t{1} << 30));
  if (!fixture.ok()) return fixture.status();
  absl::Status status = (*fixture)->Append(k.data(), v.data(), tokens, 0, tokens);
  if (!status.ok()) return status;
  std::cout << Json{{"device", (*fixture)->device().info().description},
                    {"thread_count", (*fixture)->device().info().thread_count},
                    {"plain_read", kPlainReadHow}}
            << std::endl;
  CacheFlush flush;
  for (std::string line; std::getline(std::cin, line);) {
    const absl::StatusOr<Json> answer = Answer(**fixture, queries, flush, Json::parse(line));
    std::cout << (answer.ok() ? *answer : Json{{"error", answer.status().ToString()}}) << std::endl;
  }
  return absl::OkStatus();
}

}  // namespace
}  // namespace spillway::bench

int main(int argc, char** argv) {
  if (argc != 2) {
    std::cerr << "usage: attend_worker DATA_DIRECTORY\n";
    return 2;
  }
  try {
    const absl::Status status = spillway::bench::Serve(argv[1]);
    if (status.ok()) return 0;
    std::cerr << "attend_worker: " << status << '\n';
  } catch (const std::exception& e) {  // thrown by the JSON library
    std::cerr << "attend_worker: " << e.what() << '\n';
  }
  return 1;
}
