#include "oracle/json_write.hpp"

#include <fmt/format.h>

#include <cmath>

#include "oracle/joined.hpp"
#include "oracle/json.hpp"

namespace shardproof::json_write {

std::string number(double x) {
  if (std::isnan(x)) return "\"nan\"";
  if (std::isinf(x)) return x > 0 ? "\"inf\"" : "\"-inf\"";
  return fmt::format("{}", x);
}

std::string list(const std::vector<std::string>& values) {
  return fmt::format("[{}]", joined(values, ","));
}

std::string object(const std::vector<std::pair<std::string, std::string>>& members) {
  std::vector<std::string> parts;
  for (const auto& [name, value] : members) parts.push_back(json_text(name) + ":" + value);
  return fmt::format("{{{}}}", joined(parts, ","));
}

std::string texts(const std::vector<std::string>& words) {
  std::vector<std::string> values;
  for (const std::string& w : words) values.push_back(json_text(w));
  return list(values);
}

// JSON has '<' in texts only, where it may be written by its number.
std::string in_script(const std::string& json) {
  std::string safe;
  safe.reserve(json.size());
  for (const char c : json) {
    if (c == '<')
      safe += "\\u003c";
    else
      safe += c;
  }
  return safe;
}

}  // namespace shardproof::json_write
