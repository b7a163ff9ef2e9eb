// What a person reads: the block of a failure, and the lines that close a run.
//
//   FAILED     linear_row tp=4 sp=on    gradient of bias
//   at         b[0], every rank   got 12   want 3   bound 0 (integers)   7 of 7 elements, ...
//   means      a sum that was already whole was summed again
//   passed     forward, adjoint, ledger
//   replay     build/shardproof run linear_row tp=4 sp=on --check gradient
#include <fmt/format.h>

#include <algorithm>
#include <cctype>
#include <cmath>
#include <cstdlib>

#include "oracle/checks/patterns.hpp"
#include "oracle/joined.hpp"
#include "oracle/report.hpp"
#include "oracle/report_parts.hpp"

namespace shardproof {

using namespace telling;

namespace {

constexpr size_t most_also = 4;  // further findings named in a block

// "processes.np4" -> 4; 0 where the lane does not say.
int world_of(const std::string& lane) {
  const size_t at = lane.rfind(".np");
  return at == std::string::npos ? 0 : std::atoi(lane.c_str() + at + 3);
}

std::string value_of(const std::string& line, const std::string& key) {
  const std::string padded = " " + line + " ";
  const size_t at = padded.find(" " + key + "=");
  if (at == std::string::npos) return "";
  const size_t from = at + key.size() + 2;
  return padded.substr(from, padded.find(' ', from) - from);
}

// "gradient of b", not "gradient of gradient of b".
std::string subject_of(const std::string& check, const Finding& f) {
  if (f.tensor.empty() || f.tensor == check) return check;
  return f.tensor.starts_with(check + " of ") ? f.tensor : check + " of " + f.tensor;
}

std::string ranks_text(const std::vector<int>& which, int world) {
  return world > 1 && int(which.size()) == world ? "every rank" : ranks(which);
}

// Where the element that is shown is wrong.
std::string ranks_of(const Finding& f, int world) {
  const std::vector<int>& which = f.holders.empty() ? f.ranks : f.holders;
  if (!which.empty()) return ranks_text(which, world);
  return f.rank < 0 ? "" : ranks({f.rank});
}

std::string bound_of(const Finding& f, const CaseResult& c) {
  if (f.bound != 0) return fmt::format("bound {}   ratio {}", number(f.bound), ratio(f.ratio));
  // On other data nothing is allowed where bits are only moved, or where a check feeds integers.
  return value_of(c.canonical, "fill") == "integers" ? "bound 0 (integers)" : "bound 0 (exact)";
}

std::string extent_of(const Finding& f, int world) {
  std::string text;
  if (f.compared > 0) text = fmt::format("{} of {}", f.wrong, number_of(f.compared, "element"));
  if (!text.empty() && !f.holders.empty() && f.holders != f.ranks)
    text += " on " + ranks_text(f.ranks, world);
  if (!f.pattern.empty()) text += (text.empty() ? "" : ", ") + f.pattern;
  return text;
}

// "b[0], every rank   got 12   want 3   bound 0 (integers)   7 of 7 elements, all x 4.000 = tp"
std::string seen(const Finding& f, const CaseResult& c) {
  std::vector<std::string> place, parts;
  if (!f.where.empty()) place.push_back(f.where);
  if (std::string r = ranks_of(f, world_of(c.lane)); !r.empty()) place.push_back(r);
  if (!place.empty()) parts.push_back(joined(place));
  if (!f.message.empty()) parts.push_back(f.message);
  if (f.numeric) {
    const auto [got, want] = distinguished(f.got, f.want);
    parts.push_back(fmt::format("got {}   want {}   {}", got, want, bound_of(f, c)));
  }
  if (std::string extent = extent_of(f, world_of(c.lane)); !extent.empty()) parts.push_back(extent);
  return joined(parts, "   ");
}

std::string upper(std::string text) {
  for (char& c : text) c = char(std::toupper(static_cast<unsigned char>(c)));
  return text;
}

std::string first_note(const CaseResult& c, Verdict v) {
  for (const CheckResult& check : c.checks) {
    if (check.verdict != v) continue;
    if (!check.note.empty()) return check.note;
    if (!check.findings.empty() && !check.findings[0].message.empty())
      return check.findings[0].message;
  }
  return "";
}

// What stands behind the line in the first row: the check and tensor, or how a world ended.
std::string what_happened(const CaseResult& c, const CheckResult& first) {
  switch (first.verdict) {
    case Verdict::failed:
      return first.findings.empty() ? first.check : subject_of(first.check, first.findings[0]);
    case Verdict::hung:
    case Verdict::crashed: {
      const std::string note = first_note(c, first.verdict);
      return note.empty() ? first.check : note;
    }
    default:
      return first.note.empty() ? first.check : first.check + ": " + first.note;
  }
}

// They hold the backward against the forward, and cannot say which of them is wrong.
bool compares_backward_with_forward(const CheckResult& check) {
  return check.check == "adjoint" || check.check == "gradcheck";
}

bool ended(const CaseResult& c, const std::string& name, Verdict v) {
  return std::any_of(c.checks.begin(), c.checks.end(), [&](const CheckResult& check) {
    return check.check == name && check.verdict == v;
  });
}

// Where the gradients are right it is the forward, and what the backward has k times too little of
// the forward has k times. "" where they do not say how often.
std::string times_too_often(const CaseResult& c) {
  for (const CheckResult& check : c.checks) {
    if (!compares_backward_with_forward(check)) continue;
    for (const Finding& f : check.findings) {
      const std::string of = "gradient of ";
      if (!f.numeric || f.got == 0 || !f.tensor.starts_with(of)) continue;
      const double times = f.want / f.got, whole = std::round(times);
      const std::string operand = f.tensor.substr(of.size());
      if (whole >= 2 && whole <= world_of(c.lane) && std::abs(times - whole) <= 1e-3 * whole)
        return fmt::format(
            "the gradients are right, and the forward counts {} {:.0f} times: a term that every "
            "rank "
            "adds before a sum, or a sum in place of a mean",
            operand, whole);
    }
  }
  return "";
}

// Operands of which adjoint and gradcheck say that forward and backward do not belong together;
// those that the forward does not move with at all.
struct Apart {
  std::vector<std::string> operands, unread;
};
Apart operands_apart(const CaseResult& c) {
  Apart apart;
  const auto put = [](std::vector<std::string>& names, const std::string& name) {
    if (std::find(names.begin(), names.end(), name) == names.end()) names.push_back(name);
  };
  for (const CheckResult& check : c.checks) {
    if (!compares_backward_with_forward(check) || check.verdict != Verdict::failed) continue;
    for (const Finding& f : check.findings) {
      const std::string of = "gradient of ";
      if (!f.numeric || !f.tensor.starts_with(of)) continue;
      put(apart.operands, f.tensor.substr(of.size()));
      if (f.want == 0 && f.got != 0) put(apart.unread, f.tensor.substr(of.size()));
    }
  }
  return apart;
}

std::string in_words(const std::vector<std::string>& names) {
  return joined(std::span(names).first(names.size() - 1)) + (names.size() > 1 ? " and " : "") +
         names.back();
}

// Where the gradients are right, or most of the wrong ones are those of a wrong forward, the few
// that do not belong to it say where it is wrong.
std::string few_apart(const CaseResult& c) {
  const Apart apart = operands_apart(c);
  if (apart.operands.empty()) return "";
  if (ended(c, "gradient", Verdict::passed))
    return apart.unread.empty()
               ? ""
               : fmt::format(
                     "the gradients are right, and the forward does not move with {}, "
                     "which it leaves out",
                     in_words(apart.unread));
  size_t together = 0;
  for (const CheckResult& check : c.checks)
    if (check.check == "gradient")
      for (const Finding& f : check.findings)
        together += std::none_of(apart.operands.begin(), apart.operands.end(),
                                 [&](const auto& o) { return f.tensor == "gradient of " + o; });
  if (together <= apart.operands.size()) return "";
  if (apart.unread == apart.operands)
    return fmt::format(
        "the forward does not move with {}, which it leaves out: the other gradients are those of "
        "what it computes",
        in_words(apart.unread));
  const bool one = apart.operands.size() == 1;
  return fmt::format(
      "but for {} the gradients are those of what the forward computes: {} read at one place and "
      "given {} at another (a slice, a copy, an owner), or left out of one of the two",
      in_words(apart.operands), one ? "it is" : "they are", one ? "a gradient" : "gradients");
}

// What was written where nobody may write, or never, is the cause of wrong values and no result of
// them.
std::string cause_in_memory(const CaseResult& c) {
  for (const CheckResult& check : c.checks)
    if (check.check == "memory" && check.verdict == Verdict::failed)
      for (const Finding& f : check.findings)
        if (!f.means.empty())
          return fmt::format("{}: {}; {}", subject_of(check.check, f), f.message, f.means);
  return "";
}

// What a wrong forward and its backward say of each other; "" where nobody held one against the
// other.
std::string of_forward_and_backward(const CaseResult& c) {
  bool apart = false, together = false;
  for (const CheckResult& check : c.checks)
    if (compares_backward_with_forward(check)) {
      apart = apart || check.verdict == Verdict::failed;
      together = together || check.verdict == Verdict::passed;
    }
  if (apart && ended(c, "gradient", Verdict::passed))
    return "the gradients are right: what the forward computes is not what they belong to";
  if (apart && ended(c, "gradient", Verdict::failed))
    return "the gradients are wrong as well, and not those of what the forward computes: two "
           "mistakes, or one that acts on both in different ways";
  if (apart)
    return "the forward is wrong by itself; that its backward does not fit it says nothing until "
           "that is mended";
  if (together && ended(c, "gradient", Verdict::failed))
    return "the gradients are those of what the forward computes: one mistake in both, such as "
           "a position, a mask, a route, an owner or a type";
  return "";
}

// The sentences that findings bring along, of which some say little of a wrong forward: a pairing
// with its backward nothing that is certain, and of a tensor that is mostly right that it is so.
class Sentences {
 public:
  Sentences(const CaseResult& c, const CheckResult& first)
      : case_(c), first_(first), wrong_forward_(ended(c, "forward", Verdict::failed)) {}

  bool of_wrong_forward() const { return wrong_forward_; }
  std::string first(bool nearly_right) const { return among(first_, nearly_right); }
  std::string any(bool nearly_right) const {
    for (const CheckResult& check : case_.checks)
      if (std::string means = among(check, nearly_right); !means.empty()) return means;
    return "";
  }
  std::string of(std::string_view name) const {
    for (const CheckResult& check : case_.checks)
      if (check.check == name) return among(check, false);
    return "";
  }

 private:
  std::string among(const CheckResult& check, bool nearly_right) const {
    for (const Finding& f : check.findings) {
      if (f.means.empty() || (f.means == means_of_near) != nearly_right) continue;
      if (wrong_forward_ && f.numeric && compares_backward_with_forward(check)) continue;
      if (f.means == means_of_roundings && !explained_by_roundings(f)) continue;
      const bool of_another =
          f.tensor.empty() || first_.findings.empty() || f.tensor != first_.findings[0].tensor;
      return of_another ? subject_of(check.check, f) + ": " + f.means : f.means;
    }
    return "";
  }

  // Values that no rounding explains are not explained by another tensor's roundings.
  bool explained_by_roundings(const Finding& of) const {
    return first_.findings.empty() || &of == &first_.findings[0] || !first_.findings[0].numeric;
  }

  const CaseResult& case_;
  const CheckResult& first_;
  bool wrong_forward_;
};

// Rows in another order than they are due cross from document to document, too.
std::string of_leak(const CaseResult& c, const Sentences& say) {
  const std::string layout = value_of(c.canonical, "layout"), means = say.of("leak");
  if (means.empty() || layout.empty() || layout == "contiguous") return means;
  return means + "; or rows are in another order than that of layout=" + layout;
}

std::string meaning_of_wrong_forward(const CaseResult& c, const Sentences& say) {
  const bool right_gradients = ended(c, "gradient", Verdict::passed);
  for (const std::string& means : {say.first(false), right_gradients ? times_too_often(c) : "",
                                   of_leak(c, say), say.of("mask"), few_apart(c), say.first(true),
                                   say.any(false), of_forward_and_backward(c), say.any(true)})
    if (!means.empty()) return means;
  return "";
}

std::string meaning(const CaseResult& c, const CheckResult& first) {
  if (first.check != "memory")
    if (std::string cause = cause_in_memory(c); !cause.empty()) return cause;
  const Sentences say(c, first);
  if (say.of_wrong_forward()) return meaning_of_wrong_forward(c, say);
  for (const bool nearly_right : {false, true})
    if (std::string means = say.first(nearly_right); !means.empty()) return means;
  for (const bool nearly_right : {false, true})
    if (std::string means = say.any(nearly_right); !means.empty()) return means;
  return "";
}

// Findings behind the first one, of this check and of others: "gradient of x: x[0,1] got ...". Of
// each other check that failed the first one before any second.
std::vector<std::string> also(const CaseResult& c, const CheckResult& first) {
  std::vector<std::string> texts, further;
  for (const CheckResult& check : c.checks) {
    if (check.verdict != Verdict::failed) continue;
    for (size_t i = &check == &first ? 1 : 0; i < check.findings.size(); i++)
      (i == 0 ? texts : further)
          .push_back(subject_of(check.check, check.findings[i]) + ": " +
                     seen(check.findings[i], c));
    if (check.findings.empty() && &check != &first)
      texts.push_back(check.note.empty() ? check.check : check.check + ": " + check.note);
  }
  texts.insert(texts.end(), further.begin(), further.end());
  return texts;
}

std::string names(const CaseResult& c, Verdict v, bool with_notes) {
  std::vector<std::string> words;
  for (const CheckResult& check : c.checks)
    if (check.verdict == v)
      words.push_back(with_notes && !check.note.empty() ? check.check + " (" + check.note + ")"
                                                        : check.check);
  return joined(words);
}

std::string rest(const CaseResult& c, const CheckResult& first) {
  std::string text;
  for (Verdict v : {Verdict::vacuous, Verdict::untested, Verdict::skipped, Verdict::passed}) {
    if (v == first.verdict) continue;
    const std::string list = names(c, v, v != Verdict::passed);
    if (!list.empty()) text += row(name(v), list);
  }
  return text;
}

std::string replay_of(const CaseResult& c, const CheckResult& first, const std::string& program) {
  std::string call = c.replay.empty() ? "run " + c.line : c.replay;
  const size_t named = call.find(" --check ");
  if (&first == headline(c) && named != std::string::npos) return program + " " + call;
  return program + " " + call.substr(0, named) + " --check " + first.check;
}

std::string again(const CaseResult& c) {
  if (!c.steady_known) return "";
  return row("again", c.steady ? "fails in every rerun in a fresh world"
                               : "intermittent: a rerun in a fresh world passed");
}

std::string saw(const CaseResult& c, const CheckResult& first) {
  std::string text;
  if (first.verdict == Verdict::failed) {
    if (!first.findings.empty()) text += row("at", seen(first.findings[0], c));
    if (!first.note.empty()) text += row("note", first.note);
  }
  const std::vector<std::string> others = also(c, first);
  for (size_t i = 0; i < std::min(others.size(), most_also); i++) text += row("also", others[i]);
  if (others.size() > most_also)
    text += row("also",
                fmt::format("{} more; --report DIR writes all of them", others.size() - most_also));
  return text;
}

}  // namespace

std::string block(const CaseResult& c, const std::string& program) {
  const CheckResult* first = headline(c);
  if (!first) return row("UNTESTED", c.line + "    no check was due");
  return first->verdict == Verdict::passed ? passed_line(c) : block_about(c, *first, program);
}

std::string telling::block_about(const CaseResult& c, const CheckResult& first,
                                 const std::string& program) {
  std::string text = row(upper(name(first.verdict)), c.line + "    " + what_happened(c, first));
  if (first.verdict == Verdict::hung || first.verdict == Verdict::crashed)
    for (const std::string& line : c.state) text += printable(line) + '\n';
  text += saw(c, first);
  if (std::string m = meaning(c, first); !m.empty()) text += row("means", m);
  text += rest(c, first) + again(c);
  return text + row("replay", replay_of(c, first, program));
}

std::string passed_line(const CaseResult& c) {
  std::vector<std::string> words;
  std::string reason, notes;
  for (const CheckResult& check : c.checks) {
    std::string word = check.check;
    if (check.verdict != Verdict::passed)
      word += std::string(" ") + name(check.verdict);
    else if (check.ratio != 0)
      word += " " + ratio(check.ratio);
    else if (check.exact)
      word += " exact";
    if (check.verdict == Verdict::skipped && reason.empty()) reason = check.note;
    words.push_back(word);
    // On a pass: how much was asked, or what of it could not be.
    if (check.verdict == Verdict::passed && !check.note.empty())
      notes += row("note", check.check + ": " + check.note);
  }
  const CheckResult* first = headline(c);
  const std::string label = first ? upper(name(first->verdict)) : "UNTESTED";
  std::string text = c.line + "    " + joined(words);
  if (!reason.empty()) text += " (" + reason + ")";
  return row(label, text + "   " + telling::seconds(c.seconds)) + notes;
}

namespace {

std::string control_label(const ControlResult& c) {
  if (weak(c)) return "WEAK";
  return c.outcome == ControlResult::wrong_check ? "WRONG CHECK" : upper(name(c.outcome));
}

std::string control_meaning(const ControlResult& c) {
  if (weak(c))
    return fmt::format(
        "margin {}, at least {} is due: the bound of this check is too wide to be "
        "trusted here",
        ratio(c.margin), least_margin);
  if (c.outcome == ControlResult::escaped)
    return "the judge does not see this bug, so its word on this contract counts for nothing";
  if (c.outcome == ControlResult::wrong_check)
    return "the bug was noticed, but not by the check that exists for it";
  return "";
}

}  // namespace

std::string block(const ControlResult& c, const std::string& program) {
  std::string due = c.reason;
  if (c.outcome != ControlResult::equivalent)
    due = c.expected_check.empty() ? "no check could be named" : "due: " + c.expected_check;
  std::string text =
      row(control_label(c),
          fmt::format("{} on {}    {}", c.name, c.witness.empty() ? c.contract : c.witness, due));
  if (!c.caught_by.empty()) text += row("caught by", c.caught_by);
  if (!c.reason.empty() && c.outcome != ControlResult::equivalent) text += row("saw", c.reason);
  if (c.ratio != 0 && c.outcome == ControlResult::caught)
    text += row("at",
                fmt::format("{}   ratio {}   bound {}", c.where, ratio(c.ratio), number(c.bound)));
  if (!c.imitates.empty()) text += row("imitates", c.imitates);
  if (std::string m = control_meaning(c); !m.empty()) text += row("means", m);
  if (!c.replay.empty()) text += row("replay", program + " " + c.replay);
  return text;
}

bool wants_colour(bool is_terminal) {
  const char* refused = std::getenv("NO_COLOR");
  const char* kind = std::getenv("TERM");
  return is_terminal && !(refused && *refused) && !(kind && std::string(kind) == "dumb");
}

std::string paint(const std::string& text) {
  static const std::vector<std::pair<std::string, const char*>> colours = {
      {"NO JUDGEMENT", "\033[1;31m"}, {"WRONG CHECK", "\033[1;31m"}, {"UNTESTED", "\033[1;33m"},
      {"FAILED", "\033[1;31m"},       {"HUNG", "\033[1;31m"},        {"CRASHED", "\033[1;31m"},
      {"ESCAPED", "\033[1;31m"},      {"WEAK", "\033[1;31m"},        {"VACUOUS", "\033[1;33m"},
      {"SKIPPED", "\033[33m"},        {"PASSED", "\033[1;32m"},      {"CAUGHT", "\033[32m"}};
  std::string painted;
  for (size_t from = 0; from < text.size();) {
    const size_t end = std::min(text.find('\n', from), text.size() - 1) + 1;
    const std::string line = text.substr(from, end - from);
    auto word = std::find_if(colours.begin(), colours.end(),
                             [&](auto& c) { return line.starts_with(c.first + " "); });
    if (word == colours.end())
      painted += line;
    else
      painted += word->second + word->first + "\033[0m" + line.substr(word->first.size());
    from = end;
  }
  return painted;
}

}  // namespace shardproof
