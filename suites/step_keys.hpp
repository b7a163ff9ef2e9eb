// Numbers of an optimizer's step. A line chooses among few, and who asks for another one is told
// why: it would ask nothing more of a subject.
#pragma once
#include <string>
#include <utility>
#include <vector>

#include "suites/linear.hpp"

namespace shardproof::step_keys {

inline Key chosen(const char* name, const char* fallback, std::vector<std::string> choices,
                  const char* help, const std::string& why) {
  std::string expected = "one of";
  for (const std::string& word : choices) expected += " " + word;
  expected += " (" + why + "; another one asks nothing more of a subject)";
  Key key = linears::choice(name, fallback, std::move(choices), help);
  key.valid = [expected](std::string_view) { return expected; };
  return key;
}

inline Key momentum() {
  return chosen("mu", "0.95", {"0.95", "1/2"}, "momentum",
                "the usual one, and one whose products do not round");
}
inline const char* const powers_of_two = "a power of two rounds nothing by itself";
inline Key step_size() {
  return chosen("lr", "1/8", {"1", "1/2", "1/4", "1/8", "1/64"}, "step size", powers_of_two);
}
inline Key decay(const char* help) {
  return chosen("decay", "1/4", {"0", "1/4", "1/2"}, help, powers_of_two);
}

}  // namespace shardproof::step_keys
