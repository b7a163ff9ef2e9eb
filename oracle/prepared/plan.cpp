#include "oracle/prepared/plan.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <sstream>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"
#include "oracle/checks/pairing.hpp"
#include "oracle/command.hpp"
#include "oracle/cost.hpp"
#include "oracle/drawn.hpp"
#include "oracle/joined.hpp"
#include "oracle/run.hpp"
#include "oracle/words.hpp"

namespace shardproof::prepared {
namespace {

// Why files cannot answer a check; "" where they can.
std::string why_not(const std::string& check) {
  if (check == "ledger" || check == "lockstep") return "they hold results and no calls";
  if (check == "repeat") return "they hold one run of the program";
  if (check == "gradcheck") return "finite differences would be a run for each of their points";
  if (check == "rejection") return "a refusal leaves no file";
  return "";
}

// The line without what says where ours would run.
Case foreign_line(const Case& asked) {
  for (const char* key : {"subject", "control", "fault"})
    if (!asked.text(key).empty())
      throw BadInput(
          fmt::format("key '{}': expected a line without it, met {}={}; the foreign program stands "
                      "in that place",
                      key, key, asked.text(key)));
  if (asked.text("device") != "host" || asked.text("transport") != "processes")
    throw BadInput(
        fmt::format("keys 'transport' and 'device': expected a line without them, met {}; where a "
                    "foreign program runs is its own "
                    "business",
                    print(asked)));
  if (asked.text("strides") != "contiguous")
    throw BadInput(
        fmt::format("key 'strides': expected a line without it, met strides={}; a file has no "
                    "strides: let the program make such views of what it reads",
                    asked.text("strides")));
  return asked;
}

Declared declared_for(const Contract& contract, const std::vector<std::string>& only,
                      const Registry& registry) {
  Declared d;
  for (const Subject& s : registry.subjects())
    if (s.contract == contract.name && s.name.empty())
      d.backward = s.declared.backward, d.leak_bitwise = s.declared.leak_bitwise;
  if (only.empty()) return d;
  const auto needs_backward = [&](const char* check) { return contains(only, check); };
  d.backward = d.backward && (needs_backward("gradient") || needs_backward("adjoint") ||
                              needs_backward("accumulate"));
  return d;
}

std::string prefix_of(size_t shot, int feed, bool several) {
  if (shot == 0) return "";
  return several ? fmt::format("shot{}.{}/", shot, feed) : fmt::format("shot{}/", shot);
}

bool has_gradient(const Operand& o) {
  return o.role != Operand::output && o.role != Operand::index && o.gradient;
}

Pass pass_of(const Evidence& e, size_t number) {
  const Shot& shot = e.shots[number];
  Pass pass{shot.name, shot.accumulate, {}};
  std::istringstream words(shot.program);
  for (std::string word; words >> word;) {
    Step s;
    s.backward = word[0] == 'B';
    s.feed = std::stoi(word.substr(1));
    s.prefix = prefix_of(number, s.feed, shot.feeds.size() > 1);
    s.keys = shot.feeds[size_t(s.feed)].keys;
    pass.steps.push_back(std::move(s));
  }
  for (size_t i = 0; i < pass.steps.size(); ++i) {
    Step& s = pass.steps[i];
    const bool last = i + 1 == pass.steps.size();
    for (int k = 0; k < int(e.operands.size()); ++k) {
      const Operand& o = e.operands[size_t(k)];
      const bool output = k >= e.inputs;
      const Named named{s.prefix + (s.backward ? "grad." : "") + o.name, k, s.backward};
      if (output == s.backward)
        s.takes.push_back(named);
      else if (!s.backward ||
               (has_gradient(o) && (last || !shot.accumulate || o.role != Operand::parameter)))
        s.gives.push_back(named);
    }
  }
  return pass;
}

}  // namespace

Plan plan_of(const Case& asked, const std::vector<std::string>& only, const Registry& registry,
             bool given_in_files) {
  Plan plan;
  plan.only = only;
  plan.line = std::make_unique<const Case>(foreign_line(asked));
  check_world(*plan.line);
  check_legal(*plan.line, registry);
  const Contract& contract = registry.contract(plan.line->contract);
  const Declared declared = declared_for(contract, only, registry);
  for (const std::string& check : due_checks(contract, *plan.line, declared, {})) {
    std::string why = why_not(check);
    if (why.empty() && !only.empty() && !contains(only, check)) why = "not asked for";
    if (why.empty())
      plan.checks.push_back(check);
    else
      plan.unasked.push_back({check, why});
  }
  if (plan.checks.empty())
    throw BadInput(
        fmt::format("--check: expected a check that is due on the line and can be asked of files, "
                    "met {}; {} can be asked by `run` only",
                    joined(only, ", "), "ledger, lockstep, repeat, gradcheck, rejection"));
  plan.evidence =
      plan_case_of_any_size(*plan.line, declared, plan.checks, registry, given_in_files);
  for (size_t s = 0; s < plan.evidence.shots.size(); ++s)
    plan.passes.push_back(pass_of(plan.evidence, s));
  return plan;
}

DType Plan::dtype_of(const Named& n) const {
  return judging::result_dtype(evidence, evidence.operands[size_t(n.operand)], n.gradient);
}

Layout Plan::layout_of(const Named& n) const {
  return judging::result_layout(evidence.operands[size_t(n.operand)], n.gradient);
}

std::vector<int64_t> Plan::local_shape_of(const Named& n, int rank) const {
  return local_shape(evidence.operands[size_t(n.operand)].shape, layout_of(n), evidence.mesh, rank);
}

std::vector<std::byte> fed(const Plan& plan, const Pass& pass, const Step& step, const Named& n,
                           int rank) {
  const Evidence& e = plan.evidence;
  const size_t shot = size_t(&pass - plan.passes.data());
  const Feed& feed = e.shots[shot].feeds[size_t(step.feed)];
  const Operand& o = e.operands[size_t(n.operand)];
  const DType dtype = plan.dtype_of(n);
  const Layout layout = plan.layout_of(n);
  const auto indices = whole_indices(o.shape, layout, e.mesh, rank);
  std::vector<std::byte> bytes(indices.size() * size_of(dtype));
  const auto put = [&](size_t i, double v) { store(bytes.data() + i * size_of(dtype), dtype, v); };
  if (is_drawn(feed, n.operand)) {  // a large tensor is never drawn as a whole
    const auto shape = whole_shape(o.shape, layout, e.mesh);
    const auto values = drawn_at({*plan.line, o, n.gradient, feed, dtype, shape}, indices);
    for (size_t i = 0; i < indices.size(); ++i) put(i, values[i]);
    return bytes;
  }
  const Whole whole = drawn(e, feed, n.operand, n.gradient);
  for (size_t i = 0; i < indices.size(); ++i) put(i, whole.value[size_t(indices[i])]);
  return bytes;
}

std::string in_file(int rank) { return fmt::format("rank{}.in.safetensors", rank); }
std::string out_file(int rank) { return fmt::format("rank{}.out.safetensors", rank); }

}  // namespace shardproof::prepared
