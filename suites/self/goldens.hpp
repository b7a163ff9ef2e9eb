// What PyTorch's autograd gave (fixtures/goldens), as tests read it.
#pragma once
#include <filesystem>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <stdexcept>
#include <string>
#include <vector>

namespace shardproof::testing {

inline nlohmann::json golden(const std::string& name) {
  const auto folder = std::filesystem::path(__FILE__).parent_path() / "../../fixtures/goldens";
  std::ifstream file(folder / (name + ".json"));
  if (!file) throw std::runtime_error("expected " + (folder / name).string() + ".json");
  return nlohmann::json::parse(file);
}

inline std::vector<double> values(const nlohmann::json& g, const char* part, const char* tensor) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  std::vector<double> v;
  for (const auto& x : g.at(part).at(tensor).at("data"))
    v.push_back(x.is_string() ? (x == "inf" ? infinity : -infinity) : x.get<double>());
  return v;
}

inline int64_t extent(const nlohmann::json& g, const char* tensor, size_t dim) {
  return g.at("inputs").at(tensor).at("shape").at(dim).get<int64_t>();
}

}  // namespace shardproof::testing
