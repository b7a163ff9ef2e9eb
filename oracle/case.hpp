// One point of the test space: a legible line. Parsing and printing are inverse.
//
//   linear_column tp=4 sp=on tokens=12 in=7 out=16 dtype=f32 fill=normal seed=7
#pragma once
#include <cstdint>
#include <functional>
#include <map>
#include <stdexcept>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "fixtures/placement.hpp"
#include "fixtures/tensor.hpp"

namespace shardproof {

// A wrong call: names the offending key; exit 2. what() is one line: expected, met, what is close.
struct BadInput : std::runtime_error {
  using std::runtime_error::runtime_error;
};

class Case;

inline constexpr int most_ranks_of_an_axis = 64;

// What a key of a line may hold. Integer keys have low..high, word keys their choices; a key with
// neither is free text checked by `valid` (returns what was expected, empty when right). An empty
// value is legal exactly where the fallback is empty.
struct Key {
  std::string name = {}, fallback = {}, help = {};
  std::vector<std::string> choices = {};
  int64_t low = 0, high = 0;  // integer key where high > 0
  std::function<std::string(std::string_view)> valid = nullptr;
  bool integer() const { return high > 0; }
  // Fallback that is computed from the other keys (`axis`: the only axis above 1); takes the place
  // of `fallback`. "" means that it cannot be told and the line has to give it.
  std::function<std::string(const Case&)> derive = nullptr;
  // Free text: the one spelling of values that mean the same ("007" and "7"). Called after `valid`.
  std::function<std::string(std::string_view)> normal = nullptr;
};

class Case {
 public:
  std::string contract;
  // Values of every key that the contract takes, defaults filled in. Unknown name:
  // std::out_of_range.
  const std::string& text(std::string_view key) const;
  int64_t at(std::string_view key) const;  // integer
  bool on(std::string_view key) const;     // "on"
  bool has(std::string_view key) const;    // the contract takes it
  // Unchecked (parse() checks). Keys that stand at a derived fallback follow the new value.
  void set(std::string_view key, std::string value);

  int ranks(Axis) const;
  Mesh mesh() const;
  int world() const { return mesh().world(); }
  DType dtype() const;
  uint64_t seed() const;

  std::vector<std::pair<std::string, std::string>> keys;  // in printing order: contract's order
  std::vector<std::string> defaults;                      // same order
  std::vector<std::pair<size_t, std::function<std::string(const Case&)>>>
      derived;    // by place in keys
  void derive();  // computes derived defaults anew; values that stood at them follow

 private:
  std::string& slot(std::string_view key);
};

std::string print(const Case&);            // only what differs from the default
std::string print_canonical(const Case&);  // every key

// Integers "12" "-3"; lists "7,1,10". Throw BadInput naming the key.
int64_t parse_integer(std::string_view key, std::string_view value, int64_t low, int64_t high);
std::vector<int64_t> parse_list(std::string_view key, std::string_view value);
std::string nearest(std::string_view word,
                    const std::vector<std::string>& choices);  // "" where none is close
// "; did you mean 'nearest'?"; "" where none is close.
std::string did_you_mean(std::string_view word, const std::vector<std::string>& choices);

}  // namespace shardproof
