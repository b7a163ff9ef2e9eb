// What can be named, the keys that every line takes, and reading a line.
//
// Reading goes: words -> contract -> each value against its key -> derived defaults -> what no key
// can see alone (known subject, control and operator; contradictions). Nothing here depends on the
// rank, so every rank that reads a line reads the same case.
#include "oracle/registry.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <iterator>
#include <set>
#include <sstream>
#include <utility>

#include "oracle/comm/faults.hpp"
#include "oracle/comm/world.hpp"
#include "oracle/joined.hpp"
#include "oracle/printable.hpp"
#include "oracle/words.hpp"

namespace shardproof {

namespace {

std::string shown(std::string_view word) { return telling::in_quotes(word); }

template <class Named>
std::vector<std::string> names_of(const std::vector<Named>& all, const std::string& contract) {
  std::vector<std::string> names;
  for (const Named& one : all)
    if (one.contract == contract && !one.name.empty()) names.push_back(one.name);
  return names;
}

// GoogleTest and ctest read '-', '*', '?' and ':' in a name as a pattern; '=', '@', ',' and blanks
// are the line's own.
void require_plain(const char* what, const std::string& name) {
  for (char c : name)
    if (!std::isalnum(static_cast<unsigned char>(c)) && c != '_')
      throw std::invalid_argument(fmt::format(
          "the name of a {}: expected letters, digits and '_', met {}", what, shown(name)));
}

template <class Named>
void require_new(const char* what, const std::vector<Named>& all, const std::string& contract,
                 const std::string& name) {
  for (const Named& one : all)
    if (one.contract == contract && one.name == name)
      throw std::invalid_argument(fmt::format("{} {} of contract {} is added twice; rename one",
                                              what, shown(name), shown(contract)));
}

// An implementation leaves unsaid what its contract says.
template <class Named>
void settle(Named& one, const Contract& c) {
  if (one.contract == c.name) one.declared.backward.unless_said(bool(c.backward));
}

}  // namespace

void Registry::add(Contract c) {
  require_plain("contract", c.name);
  require_plain("family", c.family);
  for (const Contract& other : contracts_)
    if (other.name == c.name || c.name.empty())
      throw std::invalid_argument(
          fmt::format("contract {} is added twice or has no name", shown(c.name)));
  for (const Key& key : c.keys) require_plain("key", key.name);
  contracts_.push_back(std::move(c));
  for (Subject& s : subjects_) settle(s, contracts_.back());
  for (Control& control : controls_) settle(control, contracts_.back());
}

void Registry::add(Subject s) {
  require_plain("subject", s.name);
  require_new("subject", subjects_, s.contract, s.name);
  for (const Contract& c : contracts_) settle(s, c);
  subjects_.push_back(std::move(s));
}

void Registry::add(Control c) {
  require_plain("control", c.name);
  require_new("control", controls_, c.contract, c.name);
  for (const Contract& contract : contracts_) settle(c, contract);
  controls_.push_back(std::move(c));
}

const Contract& Registry::contract(const std::string& name) const {
  for (const Contract& c : contracts_)
    if (c.name == name) return c;
  std::vector<std::string> known, of_family;
  for (const Contract& c : contracts_) {
    known.push_back(c.name);
    if (c.family == name) of_family.push_back(c.name);
  }
  if (!of_family.empty())
    throw BadInput(fmt::format("contract {}: expected one contract, met a family; it holds {}",
                               shown(name), joined(of_family, " ")));
  std::string close = did_you_mean(name, known);
  throw BadInput(fmt::format("contract {}: expected a contract's name, met none that is known{}",
                             shown(name), close.empty() ? "; `list` names all of them" : close));
}

const Subject& Registry::subject(const std::string& contract, const std::string& name) const {
  for (const Subject& s : subjects_)
    if (s.contract == contract && s.name == name) return s;
  std::vector<std::string> known = names_of(subjects_, contract);
  if (name.empty())
    throw BadInput(fmt::format(
        "key 'subject': {} has no subject of its own, so expected subject= with one of: {}",
        contract, known.empty() ? "(none is registered)" : joined(known, " ")));
  throw BadInput(
      fmt::format("key 'subject': expected a subject of {} ({}), met {}{}", contract,
                  known.empty() ? "only the default, without this key" : joined(known, " "),
                  shown(name), did_you_mean(name, known)));
}

const Control& Registry::control(const std::string& contract, const std::string& name) const {
  for (const Control& c : controls_)
    if (c.contract == contract && c.name == name) return c;
  std::vector<std::string> known = names_of(controls_, contract), elsewhere;
  for (const Control& c : controls_)
    if (c.name == name) elsewhere.push_back(c.contract);
  if (!elsewhere.empty())
    throw BadInput(
        fmt::format("key 'control': expected a control of {}, met {}, which is one of {}", contract,
                    shown(name), joined(elsewhere, " ")));
  throw BadInput(fmt::format("key 'control': expected a control of {} ({}), met {}{}", contract,
                             known.empty() ? "it has none" : joined(known, " "), shown(name),
                             did_you_mean(name, known)));
}

std::vector<std::string> Registry::families() const {
  std::set<std::string> names;
  for (const Contract& c : contracts_) names.insert(c.family);
  return {names.begin(), names.end()};
}

namespace {

std::string expected_seed(std::string_view value) {
  uint64_t seed = 0;
  return whole_number(value, seed) ? "" : "an integer from 0 to 18446744073709551615";
}

std::string plain_seed(std::string_view value) {
  uint64_t seed = 0;
  whole_number(value, seed);
  return std::to_string(seed);
}

std::vector<std::string> axis_names() {
  std::vector<std::string> names;
  for (Axis a : Mesh::default_order()) names.emplace_back(name(a));
  return names;
}

std::string expected_order(std::string_view value) {
  std::vector<std::string> seen;
  for (const std::string& word : split(value, ',')) {
    bool again = std::find(seen.begin(), seen.end(), word) != seen.end();
    if (!axis_from(word) || again)
      return "each axis at most once, fastest first, such as cp,tp (axes: " +
             joined(axis_names(), " ") + ")";
    seen.push_back(word);
  }
  return "";
}

// Axes that are left out follow in the default order.
std::string whole_order(std::string_view value) {
  std::vector<std::string> order = split(value, ',');
  for (const std::string& axis : axis_names())
    if (std::find(order.begin(), order.end(), axis) == order.end()) order.push_back(axis);
  return joined(order, ",");
}

Key integer_key(std::string name, std::string fallback, int64_t low, int64_t high,
                std::string help) {
  Key key{std::move(name), std::move(fallback), std::move(help)};
  key.low = low, key.high = high;
  return key;
}

Key word_key(std::string name, std::string fallback, std::vector<std::string> choices,
             std::string help) {
  Key key{std::move(name), std::move(fallback), std::move(help)};
  key.choices = std::move(choices);
  return key;
}

const std::vector<Key>& mesh_keys() {
  static const std::vector<Key> keys = [] {
    std::vector<Key> k;
    for (const auto& [axis, help] : {std::pair{"tp", "ranks of the tensor-parallel axis"},
                                     std::pair{"cp", "ranks of the context-parallel axis"},
                                     std::pair{"dp", "ranks of the data-parallel axis"},
                                     std::pair{"ep", "ranks of the expert-parallel axis"},
                                     std::pair{"pp", "ranks of the pipeline axis"}})
      k.push_back(integer_key(axis, "1", 1, most_ranks_of_an_axis, help));
    Key order{"order", whole_order(axis_names().front()), "axes of the mesh, the fastest first"};
    order.valid = expected_order;
    order.normal = whole_order;
    k.push_back(order);
    return k;
  }();
  return keys;
}

std::vector<Key> make_other_keys(bool exact) {
  const std::vector<std::string> types = {"f64", "f32", "bf16", "f16"};
  Key seed{"seed", "1", "of all values; any unsigned 64-bit integer"};
  seed.valid = expected_seed;
  seed.normal = plain_seed;
  Key subject{"subject", "", "implementation under test; left out: ours"};
  subject.normal = [](std::string_view name) { return std::string(name == "ours" ? "" : name); };
  return {
      word_key("dtype", "f64", types, "storage type"),
      word_key("acc", "", types, "accumulation type; left out: f64 for f64, else f32"),
      word_key("wire", "", types, "type on the wire; left out: the storage type"),
      word_key("grad", "", types, "type of parameter gradients; left out: the storage type"),
      word_key("fill", exact ? "integers" : "normal",
               {"integers", "normal", "large", "cancelling", "offset"}, "how values are drawn"),
      seed,
      word_key("strides", "contiguous", {"contiguous", "transposed", "expanded", "expanded_inputs"},
               "of all views; expanded: one value at stride 0, in all of each cotangent or along "
               "the last dim but one of each input"),
      word_key("transport", "processes", {"processes", "threads", "mpi", "nccl"},
               "what carries the calls"),
      word_key("device", "host", {"host", "cuda"}, "where the tensors live"),
      subject,
      Key{"control", "", "a deliberately broken twin in its place"},
      Key{"fault", "", "a broken collective: OPERATOR@PHASE.AXIS.NUMBER[@rankR]"},
  };
}

const std::vector<Key>& other_keys(bool exact) {
  static const std::vector<Key> integers = make_other_keys(true), normal = make_other_keys(false);
  return exact ? integers : normal;
}

// Mesh, the contract's own, numbers, place, what is under test: the printing order. A contract that
// declares a common key itself (other choices, another default) replaces it in its place.
std::vector<const Key*> key_list(const Contract& c) {
  auto own = [&c](const std::string& name) -> const Key* {
    for (const Key& key : c.keys)
      if (key.name == name) return &key;
    return nullptr;
  };
  std::vector<const Key*> list;
  std::vector<std::string> common;
  auto add_common = [&](const std::vector<Key>& keys) {
    for (const Key& key : keys) {
      const Key* replaced = own(key.name);
      list.push_back(replaced ? replaced : &key);
      common.push_back(key.name);
    }
  };
  add_common(mesh_keys());
  size_t at = list.size();
  add_common(other_keys(c.has_exact_data()));
  for (const Key& key : c.keys)
    if (std::find(common.begin(), common.end(), key.name) == common.end())
      list.insert(list.begin() + std::ptrdiff_t(at++), &key);
  return list;
}

// Words that later versions will take; a contract that declares one takes it today.
bool is_reserved(std::string_view key) {
  static const std::vector<std::string> words = {"scaling", "overlap", "chunks",
                                                 "graph",   "buffers", "nodes"};
  return std::find(words.begin(), words.end(), key) != words.end();
}

[[noreturn]] void refuse(const Key& key, const std::string& expected, std::string_view met,
                         const std::string& hint = "") {
  throw BadInput(
      fmt::format("key '{}': expected {}, met {}{}", key.name, expected, shown(met), hint));
}

[[noreturn]] void refuse_word(const Key& key, std::string_view value) {
  if (key.name == "dtype" && (value == "e4m3" || value == "e5m2"))
    refuse(key, "one of " + joined(key.choices, " "), value,
           ", which is reserved and not there yet");
  refuse(key, "one of " + joined(key.choices, " "), value, did_you_mean(value, key.choices));
}

// The value in its one spelling.
std::string checked(const Key& key, std::string_view value) {
  if (value.empty()) {
    if (key.fallback.empty() && !key.derive) return "";
    refuse(key, "a value after '='", value, "; leave the key out for its default");
  }
  if (key.integer()) return std::to_string(parse_integer(key.name, value, key.low, key.high));
  if (!key.choices.empty()) {
    if (std::find(key.choices.begin(), key.choices.end(), value) != key.choices.end())
      return std::string(value);
    if (key.valid) refuse(key, key.valid(value), value);  // says why there are no others
    refuse_word(key, value);
  }
  if (key.valid)
    if (std::string expected = key.valid(value); !expected.empty()) refuse(key, expected, value);
  return key.normal ? key.normal(value) : std::string(value);
}

// A key that another contract has is no slip.
bool is_key_of_any(const std::string& name, const Registry& registry) {
  return std::any_of(registry.contracts().begin(), registry.contracts().end(),
                     [&](const Contract& c) {
                       return std::any_of(c.keys.begin(), c.keys.end(),
                                          [&](const Key& key) { return key.name == name; });
                     });
}

[[noreturn]] void refuse_key(const std::string& name, const Contract& c,
                             const std::vector<const Key*>& keys, const Registry& registry) {
  if (name == "nodes")
    throw BadInput(
        "key 'nodes': expected in `explain` only, met in a line that is to run; leave it out");
  if (is_reserved(name))
    throw BadInput(fmt::format("key '{}': reserved and not there yet; leave it out", name));
  std::vector<std::string> known;
  for (const Key* key : keys) known.push_back(key->name);
  std::string close = is_key_of_any(name, registry) ? "" : did_you_mean(name, known);
  if (name == "plan" && !c.plans.empty())
    close = fmt::format("; a subject declares its plan ({}) in Declared::plan, no line does",
                        joined(c.plans, ", "));
  throw BadInput(fmt::format(
      "key {}: expected a key of {}, met one that it does not take{}", shown(name), c.name,
      close.empty() ? fmt::format("; it takes {}", joined(known, " ")) : close));
}

// One word of the line into the case; `given` remembers which keys were. A canonical line has its
// keys in their order.
void read_word(const std::string& word, size_t number, const Contract& c,
               const std::vector<const Key*>& keys, std::vector<bool>& given, Case& line,
               const Registry& registry) {
  size_t equals = word.find('=');
  if (equals == std::string::npos || equals == 0 || word.find('=', equals + 1) != std::string::npos)
    throw BadInput(fmt::format("word {}: expected key=value, such as tp=4", shown(word)));
  std::string name = word.substr(0, equals), value = word.substr(equals + 1);
  const auto is_named = [&](const Key* key) { return key->name == name; };
  size_t i = number;
  if (i >= keys.size() || !is_named(keys[i]))
    i = size_t(std::find_if(keys.begin(), keys.end(), is_named) - keys.begin());
  if (i == keys.size()) refuse_key(name, c, keys, registry);
  if (given[i])
    throw BadInput(fmt::format("key '{}': expected once, met twice ({} and {}); leave one out",
                               name, shown(line.keys[i].second), shown(value)));
  given[i] = true;
  if (value.empty() || value != line.keys[i].second) line.keys[i].second = checked(*keys[i], value);
}

Case at_defaults(const Contract& c, const std::vector<const Key*>& keys) {
  Case line;
  line.contract = c.name;
  for (size_t i = 0; i < keys.size(); ++i) {
    line.keys.emplace_back(keys[i]->name, keys[i]->derive ? "" : keys[i]->fallback);
    line.defaults.push_back(line.keys.back().second);
    if (keys[i]->derive) line.derived.emplace_back(i, keys[i]->derive);
  }
  return line;
}

void require_derived(const Case& line, const std::vector<const Key*>& keys) {
  for (const auto& [i, fallback] : line.derived)
    if (line.keys[i].second.empty())
      refuse(*keys[i],
             keys[i]->choices.empty() ? "a value" : "one of " + joined(keys[i]->choices, " "), "",
             fmt::format("; the rest of the line leaves it open, so write {}=", keys[i]->name));
}

void check_fault(Case& line) {
  FaultSpec spec = parse_fault(line.text("fault"));
  if (spec.rank >= line.world())
    throw BadInput(fmt::format("key 'fault': expected a rank from 0 to {} in {}, met rank {}",
                               line.world() - 1, shown(line.text("fault")), spec.rank));
  line.set("fault", print(spec));
}

// What no key can see alone.
void check_together(Case& line, const Registry& registry) {
  const std::string &subject = line.text("subject"), &control = line.text("control");
  bool faulty = !line.text("fault").empty();
  if (control.find('@') != std::string::npos)
    throw BadInput(
        fmt::format("key 'control': expected a control's name, met {}; a step after '@' "
                    "belongs to `drift`",
                    shown(control)));
  if (!subject.empty()) registry.subject(line.contract, subject);
  if (!control.empty()) registry.control(line.contract, control);
  if (!control.empty() && !subject.empty())
    throw BadInput(
        "keys 'control' and 'subject': expected one of them, met both; a control takes "
        "the subject's place");
  if (!control.empty() && faulty)
    throw BadInput(
        "keys 'control' and 'fault': expected one of them, met both; a line breaks one "
        "thing at a time");
  if (line.text("transport") == "nccl" && line.text("device") == "host")
    throw BadInput(
        "keys 'transport' and 'device': expected device=cuda with transport=nccl, met "
        "device=host; NCCL moves device memory only");
  if (faulty) check_fault(line);
}

}  // namespace

std::vector<Key> keys_of(const Contract& c) {
  std::vector<Key> keys;
  for (const Key* key : key_list(c)) keys.push_back(*key);
  return keys;
}

Case parse_words(const std::vector<std::string>& words, const Registry& registry) {
  if (words.empty())
    throw BadInput(
        "empty line: expected CONTRACT key=value ..., such as linear_row tp=4; `list` "
        "names the contracts");
  if (words[0].find('=') != std::string::npos)
    throw BadInput(fmt::format("word {}: expected the contract first, such as linear_row tp=4",
                               shown(words[0])));
  const Contract& contract = registry.contract(words[0]);
  std::vector<const Key*> keys = key_list(contract);
  Case line = at_defaults(contract, keys);
  std::vector<bool> given(keys.size());
  for (size_t i = 1; i < words.size(); ++i)
    read_word(words[i], i - 1, contract, keys, given, line, registry);
  line.derive();
  require_derived(line, keys);
  check_together(line, registry);
  return line;
}

Case parse(const std::string& line, const Registry& registry) {
  std::istringstream words(line);
  return parse_words({std::istream_iterator<std::string>(words), {}}, registry);
}

void check_world(const Case& line) {
  std::string mesh;
  for (Axis a : Mesh::default_order())
    if (line.ranks(a) > 1) mesh += fmt::format(" {}={}", name(a), line.ranks(a));
  int64_t ranks = 1;
  for (Axis a : Mesh::default_order()) ranks *= line.ranks(a);
  int most = most_ranks(line.text("transport"));
  if (ranks > most)
    throw BadInput(fmt::format("keys{}: expected at most {} ranks on transport={}, met {}", mesh,
                               most, line.text("transport"), ranks));
}

}  // namespace shardproof
