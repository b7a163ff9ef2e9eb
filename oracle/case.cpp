// The values of a case line, its two printed forms, and the parsers that every value goes through.
//
// Invariant: defaults[i] is what keys[i] would hold had the line left it out. print() drops exactly
// the keys that stand there, so parse(print(c)) == c, and parse(print_canonical(c)) == c since the
// canonical form leaves nothing to a default.
#include "oracle/case.hpp"

#include <algorithm>
#include <numeric>

#include "oracle/printable.hpp"
#include "oracle/words.hpp"

namespace shardproof {

namespace {

// Asked for every few microseconds: most keys of the same length part in their first letter.
size_t place_of(const Case& c, std::string_view key) {
  for (size_t i = 0; i < c.keys.size(); ++i) {
    const std::string& name = c.keys[i].first;
    if (name.size() == key.size() && !key.empty() && name[0] == key[0] && name == key) return i;
  }
  return c.keys.size();
}

std::string shown(std::string_view word) { return telling::in_quotes(word); }

// Optimal string alignment: insertions, deletions, substitutions, swaps of neighbours.
size_t edit_distance(std::string_view a, std::string_view b) {
  std::vector<size_t> before(b.size() + 1), last(b.size() + 1), row(b.size() + 1);
  std::iota(last.begin(), last.end(), size_t(0));
  for (size_t i = 1; i <= a.size(); ++i) {
    row[0] = i;
    for (size_t j = 1; j <= b.size(); ++j) {
      row[j] = std::min({last[j] + 1, row[j - 1] + 1, last[j - 1] + (a[i - 1] != b[j - 1])});
      if (i > 1 && j > 1 && a[i - 1] == b[j - 2] && a[i - 2] == b[j - 1])
        row[j] = std::min(row[j], before[j - 2] + 1);
    }
    std::swap(before, last);
    std::swap(last, row);
  }
  return last[b.size()];
}

}  // namespace

std::string& Case::slot(std::string_view key) {
  size_t i = place_of(*this, key);
  if (i == keys.size())
    throw std::out_of_range(contract + " takes no key '" + std::string(key) + "'");
  return keys[i].second;
}

const std::string& Case::text(std::string_view key) const {
  return const_cast<Case*>(this)->slot(key);
}

int64_t Case::at(std::string_view key) const {
  int64_t value = 0;
  if (!whole_number(text(key), value))
    throw std::out_of_range("key '" + std::string(key) + "' holds " + shown(text(key)) +
                            ", which is no 64-bit integer");
  return value;
}

bool Case::on(std::string_view key) const { return text(key) == "on"; }

bool Case::has(std::string_view key) const { return place_of(*this, key) != keys.size(); }

void Case::set(std::string_view key, std::string value) {
  slot(key) = std::move(value);
  derive();
}

void Case::derive() {
  for (const auto& [i, fallback] : derived) {
    bool follows = keys[i].second == defaults[i];
    defaults[i] = fallback(*this);
    if (follows) keys[i].second = defaults[i];
  }
}

int Case::ranks(Axis a) const { return has(name(a)) ? int(at(name(a))) : 1; }

Mesh Case::mesh() const {
  std::map<Axis, int> sizes;
  for (Axis a : Mesh::default_order()) sizes[a] = ranks(a);
  std::vector<Axis> order;
  if (has("order"))
    for (const std::string& word : split(text("order"), ','))
      if (auto axis = axis_from(word)) order.push_back(*axis);
  for (Axis a : Mesh::default_order())
    if (std::find(order.begin(), order.end(), a) == order.end()) order.push_back(a);
  Mesh mesh(sizes, order);
  // A contract whose key heads are copied says how often; a line that it refuses splits nothing.
  if (const int64_t rep = has("kv_replicas") ? at("kv_replicas") : 1;
      rep > 0 && sizes[Axis::tp] % rep == 0)
    mesh.split_tp(int(rep));
  return mesh;
}

DType Case::dtype() const {
  auto type = dtype_from(text("dtype"));
  if (!type) throw std::out_of_range("key 'dtype' holds " + shown(text("dtype")));
  return *type;
}

uint64_t Case::seed() const {
  uint64_t value = 0;
  if (!whole_number(text("seed"), value))
    throw std::out_of_range("key 'seed' holds " + shown(text("seed")));
  return value;
}

std::string print(const Case& c) {
  std::string line = c.contract;
  for (size_t i = 0; i < c.keys.size(); ++i)
    if (c.keys[i].second != c.defaults[i]) line += " " + c.keys[i].first + "=" + c.keys[i].second;
  return line;
}

std::string print_canonical(const Case& c) {
  std::string line = c.contract;
  for (const auto& [key, value] : c.keys) line += " " + key + "=" + value;
  return line;
}

int64_t parse_integer(std::string_view key, std::string_view value, int64_t low, int64_t high) {
  int64_t number = 0;
  if (!whole_number(value, number) || number < low || number > high)
    throw BadInput("key '" + std::string(key) + "': expected an integer from " +
                   std::to_string(low) + " to " + std::to_string(high) + ", met " + shown(value));
  return number;
}

std::vector<int64_t> parse_list(std::string_view key, std::string_view value) {
  std::vector<int64_t> numbers;
  for (const std::string& word : split(value, ',')) {
    numbers.push_back(0);
    if (!whole_number(word, numbers.back()))
      throw BadInput("key '" + std::string(key) +
                     "': expected integers with a comma between them, such as 7,1,10, met " +
                     shown(value));
  }
  return numbers;
}

// Close is: a few slips away (2, or a third of the word, never all of it), or the word begins the
// choice, or one is part of the other. A choice that the word begins counts as one slip.
std::string nearest(std::string_view word, const std::vector<std::string>& choices) {
  const auto holds = [](std::string_view whole, std::string_view part) {
    return part.size() >= 4 && whole.find(part) != whole.npos;
  };
  std::string best;
  size_t best_score = std::max<size_t>(2, word.size() / 3) + 1;
  if (word.empty()) return best;
  for (const std::string& choice : choices) {
    size_t score = edit_distance(word, choice);
    if (score >= std::max(word.size(), choice.size())) continue;
    if (choice.starts_with(word))
      score = std::min<size_t>(score, 1);
    else if (holds(choice, word) || holds(word, choice))
      score = std::min<size_t>(score, 2);
    if (score < best_score) best = choice, best_score = score;
  }
  return best;
}

std::string did_you_mean(std::string_view word, const std::vector<std::string>& choices) {
  const std::string close = nearest(word, choices);
  return close.empty() ? "" : "; did you mean '" + close + "'?";
}

}  // namespace shardproof
