// What PyTorch's autograd gave (fixtures/goldens), as tests read it.
#pragma once
#include <filesystem>
#include <limits>
#include <memory>
#include <stdexcept>
#include <string>
#include <string_view>
#include <type_traits>
#include <utility>
#include <vector>

#include "oracle/json.hpp"

namespace shardproof::goldens {

// A part of a golden, which holds the whole.
class Golden {
 public:
  explicit Golden(JsonValue all) : here_(std::make_shared<const JsonValue>(std::move(all))) {}

  bool contains(const std::string& name) const { return here_->find(name) != nullptr; }
  bool is_null() const { return here_->kind == JsonValue::null; }
  bool is_string() const { return here_->kind == JsonValue::text; }
  bool operator==(std::string_view words) const { return is_string() && here_->words == words; }

  Golden at(const std::string& name) const {
    const JsonValue* part = here_->find(name);
    if (!part) throw std::out_of_range("expected '" + name + "' in a golden, met none");
    return Golden(*this, part);
  }
  std::vector<Golden> items() const {
    if (here_->kind != JsonValue::array) throw unexpected("a list");
    std::vector<Golden> all;
    for (const JsonValue& item : here_->items) all.push_back(Golden(*this, &item));
    return all;
  }

  template <class T>
  requires std::is_arithmetic_v<T>
  operator T() const {
    if constexpr (std::is_same_v<T, bool>) {
      if (here_->kind != JsonValue::boolean) throw unexpected("true or false");
      return here_->truth;
    } else if constexpr (std::is_integral_v<T>) {
      if (here_->kind != JsonValue::integer) throw unexpected("an integer");
      return T(here_->whole);
    } else {
      if (here_->kind != JsonValue::integer && here_->kind != JsonValue::real)
        throw unexpected("a number");
      return T(here_->number);
    }
  }

 private:
  Golden(const Golden& whole, const JsonValue* part) : here_(whole.here_, part) {}
  std::runtime_error unexpected(const std::string& due) const {
    return std::runtime_error("expected " + due + " in a golden, met " + shown(*here_));
  }

  std::shared_ptr<const JsonValue> here_;
};

inline Golden golden(const std::string& name) {
  const auto folder = std::filesystem::path(__FILE__).parent_path() / "../../fixtures/goldens";
  return Golden(read_json((folder / (name + ".json")).string()));
}

inline std::vector<double> values(const Golden& g, const char* part, const char* tensor) {
  constexpr double infinity = std::numeric_limits<double>::infinity();
  std::vector<double> v;
  for (const Golden& x : g.at(part).at(tensor).at("data").items())
    v.push_back(x.is_string() ? (x == "inf" ? infinity : -infinity) : double(x));
  return v;
}

inline std::vector<int64_t> integers(const Golden& list) {
  const std::vector<Golden> items = list.items();
  return {items.begin(), items.end()};
}

inline int64_t extent(const Golden& g, const char* tensor, size_t dim) {
  return integers(g.at("inputs").at(tensor).at("shape")).at(dim);
}

}  // namespace shardproof::goldens
