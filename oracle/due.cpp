// What a subject declares that it does not do is not due: it is counted and printed, and it is no
// skip, since nothing was promised. What cannot be asked of it although the lane asks it (the
// ledger of a subject whose calls do not pass the door) is not proven, which the closing lines say.
#include "oracle/due.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <set>

#include "oracle/check.hpp"
#include "oracle/device.hpp"
#include "oracle/joined.hpp"
#include "oracle/run.hpp"
#include "oracle/words.hpp"

namespace shardproof {
namespace {

std::string called(const std::string& contract, const std::string& subject) {
  return subject.empty() ? contract : fmt::format("{} subject={}", contract, subject);
}
// "gather_output=on" or "gather_output": does the line hold it, another value than the default?
bool holds(const Case& line, const std::string& words) {
  const size_t eq = words.find('=');
  const std::string key = words.substr(0, eq);
  if (eq != std::string::npos) return line.has(key) && line.text(key) == words.substr(eq + 1);
  for (size_t i = 0; i < line.keys.size(); ++i)
    if (line.keys[i].first == key) return line.keys[i].second != line.defaults[i];
  return false;
}

std::string undeclared(const Case& line, const Declared& declared) {
  if (!contains(declared.storage, line.dtype())) return fmt::format("dtype={}", name(line.dtype()));
  if (!declared.threads && line.text("transport") == "threads") return "transport=threads";
  return words_without(line, declared);
}

// Tensors on a device are asked of the subject that was made for them, and of nothing else.
std::string elsewhere(const Case& line, const Registry& registry) {
  const std::string& subject = line.text("subject");
  const std::string& control = line.text("control");
  if (!control.empty())
    if (const Control& c = registry.control(line.contract, control); c.make)
      return on_device(c, registry) == on_device(line) ? "" : "device=" + line.text("device");
  if (!on_device(line)) return is_device_subject(subject) ? "device=host" : "";
  const bool ours = subject.empty() || is_device_subject(subject);
  return ours && is_device_subject(subject_under_test(line, registry).name) ? "" : "device=cuda";
}

void check_without(const Subject& s, const Contract& contract) {
  std::vector<std::string> keys;
  for (const Key& k : keys_of(contract)) keys.push_back(k.name);
  for (const std::string& words : s.declared.without) {
    const std::string key = words.substr(0, words.find('='));
    if (!contains(keys, key))
      throw BadInput(
          fmt::format("subject {} of {}: without '{}': expected a key of the contract, met '{}'{}",
                      s.name, s.contract, words, key, did_you_mean(key, keys)));
  }
}

void check_traffic(const Subject& s, const Contract& contract) {
  const Declared& d = s.declared;
  const std::string subject = fmt::format("subject {} of {}", s.name, s.contract);
  if (!d.plan.empty() && !contains(contract.plans, d.plan))
    throw BadInput(fmt::format(
        "{}: expected {} in Declared::plan, met '{}'{}; calls of its own go into Declared::traffic",
        subject,
        contract.plans.empty() ? "nothing, as the contract has no other plan than its default,"
                               : "a plan of the contract (" + joined(contract.plans) + ")",
        d.plan, did_you_mean(d.plan, contract.plans)));
  if (d.traffic && (d.own_communication || !d.plan.empty()))
    throw BadInput(fmt::format(
        "{}: expected one statement of its calls, met Declared::traffic beside {}; leave one out",
        subject, d.own_communication ? "own_communication" : "plan '" + d.plan + "'"));
}

void check_backward(const Subject& s, const Contract& contract) {
  if (!contract.backward && s.declared.backward)
    throw BadInput(fmt::format(
        "subject {0} of {1}: expected no backward, as {1} has none: all that is judged are results "
        "of its forward; met Declared::backward = true; leave it out",
        s.name, s.contract));
}

void check_subject(const Subject& s, const Registry& registry) {
  std::vector<std::string> names;
  for (const Contract& c : registry.contracts()) names.push_back(c.name);
  if (!contains(names, s.contract))
    throw BadInput(
        fmt::format("subject {}: expected the contract that it implements, met '{}'{}; "
                    "`list` names all",
                    s.name, s.contract, did_you_mean(s.contract, names)));
  if (!s.make)
    throw BadInput(
        fmt::format("subject {} of {}: expected Subject::make, met none; give it a "
                    "function that returns a kernel",
                    s.name, s.contract));
  if (s.declared.storage.empty())
    throw BadInput(
        fmt::format("subject {} of {}: expected a storage type, met none; name one of "
                    "f64, f32, bf16, f16 in Declared::storage",
                    s.name, s.contract));
  check_backward(s, registry.contract(s.contract));
  check_without(s, registry.contract(s.contract));
  check_traffic(s, registry.contract(s.contract));
}

DType widest(const std::vector<DType>& types) {
  return *std::max_element(types.begin(), types.end(), [](DType a, DType b) {
    return significand_bits(a) < significand_bits(b);
  });
}

// World and number of axes above 1: "4x2" is a grid of four ranks.
std::string shape_of(const Case& line) {
  int axes = 0;
  for (int a = 0; a < axis_count; ++a) axes += line.ranks(Axis(a)) > 1;
  return fmt::format("{}x{}", line.world(), axes);
}

bool has_exact_range(const Contract& c, const Case& line) {
  return c.integer_range && c.integer_range(line).has_value();
}

// The line for a subject, in the widest type that it declares; empty where it is not due.
std::optional<Case> witness_for(const Contract& c, Case line, const std::string& subject,
                                const Declared& declared) {
  line.set("subject", subject);
  if (!contains(declared.storage, line.dtype())) line.set("dtype", name(widest(declared.storage)));
  const bool inexact = fill_of(line) == Fill::integers && !has_exact_range(c, line);
  if (inexact || !undeclared(line, declared).empty()) return std::nullopt;
  return line;
}

}  // namespace

std::vector<std::string> subjects_due(const Options& options, const Registry& registry,
                                      const Contract& contract) {
  const auto& all = registry.subjects();
  const size_t first =
      options.subjects.empty() && all.size() > registry.ours() ? registry.ours() : 0;
  std::vector<std::string> due;
  for (size_t i = first; i < all.size(); ++i) {
    // On a device it stands in for ours, line by line.
    if (is_device_subject(all[i].name) && options.subjects.empty()) continue;
    const std::string said = all[i].name.empty() ? "ours" : all[i].name;
    if (all[i].contract == contract.name &&
        (options.subjects.empty() || contains(options.subjects, said)))
      due.push_back(all[i].name);
  }
  return due;
}

void check_subjects(const Options& options, const Registry& registry) {
  std::vector<std::string> known{"ours"};
  for (const Subject& s : registry.subjects()) {
    check_subject(s, registry);
    if (!s.name.empty() && !contains(known, s.name)) known.push_back(s.name);
  }
  for (const std::string& s : options.subjects)
    if (!contains(known, s))
      throw BadInput(fmt::format("--subject: expected one of {}, met '{}'{}", joined(known, " "), s,
                                 did_you_mean(s, known)));
}

std::string words_without(const Case& line, const Declared& declared) {
  if (!declared.strided && line.text("strides") != "contiguous")
    return "strides=" + line.text("strides");
  for (const std::string& words : declared.without)
    if (holds(line, words)) return words;
  return "";
}

std::string called(const Case& line) { return called(line.contract, line.text("subject")); }

std::string not_due(const Case& line, const Registry& registry) {
  std::string what = elsewhere(line, registry);
  if (what.empty()) what = undeclared(line, declared_of(line, registry));
  return what.empty() ? "" : fmt::format("{}: {}", called(line), what);
}

std::vector<std::string> checks_of_backward(const Case& line, const Registry& registry,
                                            const std::vector<std::string>& only) {
  const Contract& contract = registry.contract(line.contract);
  const Declared declared = declared_of(line, registry);
  Declared able = declared;
  able.backward = true;
  const auto asked = due_checks(contract, line, declared, only);
  std::vector<std::string> left_out;
  for (const std::string& check : due_checks(contract, line, able, only))
    if (!contains(asked, check)) left_out.push_back(check);
  return left_out;
}

std::string checks_not_due(const Case& line, const Registry& registry,
                           const std::vector<std::string>& only) {
  const auto left_out = checks_of_backward(line, registry, only);
  return left_out.empty() ? "" : fmt::format("{}: {}", called(line), joined(left_out, ", "));
}

std::vector<std::string> checks_left_out(const Case& line, const Registry& registry,
                                         const std::vector<std::string>& only) {
  std::vector<std::string> texts;
  for (const Check& c : all_checks()) {
    if (!c.left_out || (!only.empty() && !contains(only, c.name))) continue;
    const std::string why =
        c.left_out(registry.contract(line.contract), line, declared_of(line, registry));
    if (!why.empty()) texts.push_back(fmt::format("{}: {}", c.name, why));
  }
  return texts;
}

std::vector<std::string> checks_unasked(const Case& line, const Registry& registry,
                                        const std::vector<std::string>& only) {
  const auto due =
      due_checks(registry.contract(line.contract), line, declared_of(line, registry), only);
  const auto of_backward = checks_of_backward(line, registry, only);
  auto texts = checks_left_out(line, registry, only);
  if (const std::string why = checks_not_due(line, registry, only); !why.empty())
    texts.push_back(why);
  for (const std::string& check : only)
    if (!contains(due, check) && !contains(of_backward, check) &&
        checks_left_out(line, registry, {check}).empty())
      texts.push_back(fmt::format("{}: nothing on this line for it to ask ({})", check,
                                  check_named(check).asks));
  return texts;
}

// The contract's witnesses; for a shape whose witness is not due, or where the contract names none,
// the first f64 case of that shape that is.
std::vector<Case> witnesses_due(const Contract& c, const Registry& registry,
                                const std::string& transport, const std::string& subject) {
  std::vector<Case> due;
  const Declared& declared = registry.subject(c.name, subject).declared;
  std::set<std::string> open;
  const auto take = [&](const std::string& text) {
    Case line = parse(text, registry);
    line.set("transport", transport);
    const std::string shape = shape_of(line);
    auto witness = witness_for(c, std::move(line), subject, declared);
    if (!witness) return open.insert(shape), void();
    open.erase(shape);
    due.push_back(std::move(*witness));
  };
  for (const std::string& text : c.witnesses) take(text);
  for (const Case& line : due) open.erase(shape_of(line));
  if (c.witnesses.empty()) open = {"2x1", "3x1", "4x1", "4x2"};
  if (open.empty()) return due;
  for (const std::string& text : c.cases("ci")) {
    const Case line = parse(text, registry);
    if (line.dtype() == DType::f64 && open.contains(shape_of(line))) take(text);
  }
  return due;
}

std::vector<Lane> unproven(const Options& options, const Registry& registry,
                           const std::vector<Due>& due) {
  std::vector<Lane> lanes;
  std::set<std::string> seen;
  for (const Due& d : due) {
    if (d.what != Due::healthy || d.illegal || !seen.insert(called(d.line)).second) continue;
    const Contract& c = registry.contract(d.line.contract);
    const std::string& subject = d.line.text("subject");
    if (declared_of(d.line, registry).own_communication) {
      const std::string reason = called(d.line) + " communicates by itself";
      lanes.push_back({"ledger", false, reason});
      lanes.push_back({"operators", false, reason});
    } else if (options.controls &&
               witnesses_due(c, registry, d.line.text("transport"), subject).empty()) {
      lanes.push_back(
          {"operators", false, called(d.line) + " has no witness among the lines that it does"});
    }
  }
  return lanes;
}

}  // namespace shardproof
