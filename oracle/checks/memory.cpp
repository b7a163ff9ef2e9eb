// M: was everything written that is due, nothing else, and no argument changed?
//
// The ranks look after each step, while the buffers exist; what they saw is judged here.
#include <fmt/format.h>

#include <limits>

#include "fixtures/sharding.hpp"
#include "oracle/checks/judging.hpp"
#include "oracle/joined.hpp"

namespace shardproof {
namespace {

struct Word {
  const char* what;
  const char* means;
};

Word word_for(const MemoryFinding& m) {
  if (m.what == "unwritten")
    return {"never written",
            "the kernel leaves part of its result to chance; here fresh buffers hold NaN"};
  if (m.what == "guard")
    return {"written beyond its end", "a write outside of the tensor: wrong extent or stride"};
  if (m.what == "workspace")
    return {"written beyond its end", "a write outside of the workspace that was asked for"};
  if (m.what == "argument")
    return {"an argument that was changed",
            "arguments are read-only: work in a workspace or in the output"};
  if (m.what == "environment")
    return {"floating-point environment changed",
            "a library or -Ofast that switches flush-to-zero or rounding for the whole process"};
  return {m.what.c_str(), ""};
}

// "x", "gradient of x", "cotangent of y" -> the operand and the layout of what the rank held.
const Operand* operand_of(const Evidence& e, const std::string& tensor, Layout& layout) {
  for (const Operand& o : e.operands)
    for (const char* prefix : {"", "gradient of ", "cotangent of "})
      if (tensor == prefix + o.name) {
        layout = *prefix ? dual(o.layout) : o.layout;
        return &o;
      }
  return nullptr;
}

void locate(const Evidence& e, const MemoryFinding& m, int rank, Finding& f) {
  if (m.what != "unwritten" && m.what != "argument") return;  // first is a byte of a guard zone
  Layout layout;
  const Operand* o = operand_of(e, m.tensor, layout);
  if (!o || m.first < 0) return;
  const auto whole = whole_indices(o->shape, layout, e.mesh, rank);
  if (size_t(m.first) >= whole.size()) return;
  f.where =
      index_text(o->name, whole[size_t(m.first)], o->shape, layout, e.mesh, /*denoted=*/false);
  f.index = judging::coordinates(whole[size_t(m.first)], whole_shape(o->shape, layout, e.mesh));
}

// What a call brings is NaN until its wait: the last call of the step that made the tensor.
std::string read_too_early(const ShotRecord& record, const std::string& tensor) {
  const bool forward = !tensor.starts_with("gradient of ");
  for (auto call = record.ledger.rbegin(); call != record.ledger.rend(); ++call)
    if ((call->phase == Phase::forward) == forward)
      return ", or what a call brings was read before its wait (the last one here: " + text(*call) +
             ")";
  return "";
}

Finding finding_of(const Evidence& e, size_t s, const MemoryFinding& m, int rank) {
  const std::string& shot = e.shots[s].name;
  const Word word = word_for(m);
  Finding f;
  f.tensor = m.tensor;
  f.message = m.what == "unwritten" ? number_of(m.count, "element") + " never written"
              : m.text.empty()      ? word.what
                                    : m.text;
  if (shot != "base") f.message += " (in '" + shot + "')";
  f.means = word.means;
  if (m.what == "unwritten") f.means += read_too_early(e.record(rank, int(s)), m.tensor);
  f.rank = rank;
  f.ranks = f.holders = {rank};
  f.wrong = m.what == "unwritten" ? m.count : 0;
  f.ratio = std::numeric_limits<double>::infinity();
  locate(e, m, rank, f);
  return f;
}

CheckResult judge(const Evidence& e) {
  if (auto f = judging::incomplete(e, "base")) return judging::conclude("memory", 0, {*f});
  std::vector<Finding> findings;
  std::vector<std::string> kinds;  // (what, tensor) of each finding
  int64_t looked_at = 0;
  for (int r = 0; r < int(e.ranks.size()); ++r)
    for (size_t s = 0; s < e.ranks[size_t(r)].shots.size(); ++s) {
      const ShotRecord& record = e.record(r, int(s));
      looked_at += int64_t(record.results.size());
      for (const MemoryFinding& m : record.memory) {
        const std::string kind = m.what + " " + m.tensor;
        const auto known = std::find(kinds.begin(), kinds.end(), kind);
        if (known == kinds.end()) {
          kinds.push_back(kind);
          findings.push_back(finding_of(e, s, m, r));
        } else if (Finding& f = findings[size_t(known - kinds.begin())]; f.ranks.back() != r) {
          f.ranks.push_back(r);
          // The element that is shown may be on some of them only.
          if (finding_of(e, s, m, r).where == f.where) f.holders.push_back(r);
        }
      }
    }
  return judging::conclude("memory", looked_at, std::move(findings));
}

}  // namespace

Check memory_check() {
  return {.name = "memory",
          .letter = 'M',
          .asks =
              "is every element written, nothing beyond, no argument and no floating-point state "
              "changed",
          .due = [](const Contract&, const Case&, const Declared&) { return true; },
          .plan = nullptr,
          .judge = judge};
}

}  // namespace shardproof
