#include "oracle/digest/log.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>

#include "oracle/case.hpp"
#include "oracle/joined.hpp"
#include "oracle/json.hpp"
#include "oracle/printable.hpp"
#include "oracle/words.hpp"

namespace shardproof::digest {
namespace {

// ---- Reading

// What a log has become on its way, by the start of a line, and how to undo it; "": it is text.
std::string packed_or_recoded(std::string_view line) {
  using namespace std::literals;
  if (line.starts_with("step=")) return "";
  const auto packed = [](const char* by, const char* undo) {
    return fmt::format("a file that {} has packed: unpack it ({})", by, undo);
  };
  const std::string wide =
      "UTF-16: write UTF-8 (iconv -f UTF-16 -t UTF-8 LOG; without a byte order mark UTF-16LE)";
  const std::pair<std::string_view, std::string> starts[] = {
      {"\x1f\x8b"sv, packed("gzip", "gunzip")},
      {"\x28\xb5\x2f\xfd"sv, packed("zstd", "unzstd")},
      {"\xfd\x37zXZ"sv, packed("xz", "unxz")},
      {"BZh"sv, packed("bzip2", "bunzip2")},
      {"PK\x03\x04"sv, packed("zip", "unzip")},
      {"\xef\xbb\xbf"sv,
       "a byte order mark: write UTF-8 without one (sed 's/^\\xEF\\xBB\\xBF//' LOG)"},
      {"\xff\xfe"sv, wide},
      {"\xfe\xff"sv, wide},
      {"s\0"sv, wide},
      {"\0s"sv, wide}};
  for (const auto& [start, told] : starts)
    if (line.starts_with(start)) return told;
  return "";
}

const char* const keys[] = {"step",     "phase", "tensor", "axis",    "rank",  "digest", "coverage",
                            "elements", "nan",   "inf",    "negzero", "dtype", "mode",   "unit"};
constexpr size_t key_count = sizeof keys / sizeof *keys;

struct Word {
  size_t column = 0;  // of the value, from 1
  std::string value;
};

class LineReader {
 public:
  LineReader(const std::string& path, int64_t number) : path_(path), number_(number) {}

  LogLine read(const std::string& line) const {
    const std::vector<Word> w = words(line);
    LogLine r;
    r.number = number_;
    r.step = integer(w[0], "a step from 0 on");
    r.phase = name(w[1]), r.tensor = name(w[2]);
    axes(w[3], r);
    place(w[4], r);
    hex(w[5], r.digest.lane);
    hex(w[6], r.digest.coverage);
    uint64_t* const counts[] = {&r.digest.elements, &r.digest.nans, &r.digest.infinities,
                                &r.digest.negative_zeros};
    for (size_t i = 0; i < 4; ++i) *counts[i] = uint64_t(integer(w[7 + i], "a count from 0 on"));
    const auto dtype = dtype_from(w[11].value);
    if (!dtype) refuse(w[11], "one of f64, f32, bf16, f16, i64, i32");
    r.hash = hash_of(r.tensor, *dtype,
                     choice(w[12], "raw", "canon") ? SHARDPROOF_CANON : SHARDPROOF_RAW);
    r.hash.unit = choice(w[13], "element", "word") ? SHARDPROOF_WORD : SHARDPROOF_ELEMENT;
    return r;
  }

 private:
  [[noreturn]] void refuse(size_t column, const std::string& expected,
                           const std::string& met) const {
    throw BadInput(fmt::format("{}:{}:{}: expected {}, met {}", path_, number_, column, expected,
                               met.empty() ? "nothing" : telling::in_quotes(met, 40)));
  }
  [[noreturn]] void refuse(const Word& w, const std::string& expected) const {
    refuse(w.column, expected, w.value);
  }

  std::vector<Word> words(const std::string& line) const {
    std::vector<Word> found;
    size_t at = 0;
    for (size_t k = 0; k < key_count; ++k) {
      const size_t end = std::min(line.find(' ', at), line.size());
      const std::string word = line.substr(std::min(at, line.size()), end - std::min(at, end)),
                        key = std::string(keys[k]) + "=";
      if (!word.starts_with(key)) refuse(std::min(at, line.size()) + 1, key + "...", word);
      found.push_back({at + key.size() + 1, word.substr(key.size())});
      at = end + 1;
    }
    if (at <= line.size()) refuse(at, "the end of the line", line.substr(at - 1));
    return found;
  }

  int64_t integer(const Word& w, const char* expected) const {
    int64_t v = 0;
    const char *begin = w.value.data(), *end = begin + w.value.size();
    const auto [last, error] = std::from_chars(begin, end, v);
    if (error != std::errc{} || last != end || v < 0) refuse(w, expected);
    return v;
  }
  std::string name(const Word& w) const {
    if (w.value.empty()) refuse(w, "a name");
    return w.value;
  }
  bool choice(const Word& w, const char* no, const char* yes) const {
    if (w.value != no && w.value != yes) refuse(w, fmt::format("{} or {}", no, yes));
    return w.value == yes;
  }
  void hex(const Word& w, uint64_t (&lanes)[2]) const {
    if (w.value.size() != 32) refuse(w, "32 hex digits");
    for (int lane = 0; lane < 2; ++lane) {
      const char *begin = w.value.data() + 16 * lane, *end = begin + 16;
      const auto [last, error] = std::from_chars(begin, end, lanes[lane], 16);
      if (error != std::errc{} || last != end) refuse(w, "32 hex digits");
    }
  }
  void axes(const Word& w, LogLine& r) const {
    for (const std::string& part : split(w.value, ',')) {
      const size_t colon = part.find(':');
      const std::string kind = colon == std::string::npos ? "" : part.substr(colon + 1, 1);
      int64_t ranks = 0;
      const bool counted = colon != std::string::npos && colon + 2 < part.size();
      if (counted) {
        const char *begin = part.data() + colon + 2, *end = part.data() + part.size();
        const auto [last, error] = std::from_chars(begin, end, ranks);
        if (error != std::errc{} || last != end || ranks > most_rank) ranks = -1;
      }
      if (colon == 0 || (kind != "S" && kind != "I" && kind != "D") || (counted && ranks < 1))
        refuse(w,
               "axes such as tp:S,dp:I (S: a shard, I: a copy, D: numbers of its own), or "
               "tp:S4,dp:I2 with their ranks");
      r.axes.emplace_back(part.substr(0, colon), kind[0]);
      r.ranks.push_back(ranks);
    }
  }
  void place(const Word& w, LogLine& r) const {
    size_t column = w.column;
    for (const std::string& part : split(w.value, ',')) {
      r.place.push_back(integer({column, part}, "a rank on each axis, such as 3,0"));
      const size_t i = r.place.size() - 1;
      if (r.place[i] > most_rank) refuse({column, part}, fmt::format("a rank up to {}", most_rank));
      if (i < r.ranks.size() && r.ranks[i] > 0 && r.place[i] >= r.ranks[i])
        refuse({column, part}, fmt::format("a rank of {} below {}", r.axes[i].first, r.ranks[i]));
      column += part.size() + 1;
    }
    if (r.place.size() != r.axes.size())
      refuse(w, number_of(int64_t(r.axes.size()), "rank") + ", one for each axis");
  }

  static constexpr int64_t most_rank = (1 << 24) - 1;
  const std::string& path_;
  int64_t number_;
};

// ---- A tensor at a step and phase

using Place = std::vector<int64_t>;

struct Entry {
  int64_t step = 0;
  std::string phase, tensor;
  std::vector<const LogLine*> lines;

  bool is(const LogLine& l) const {
    return l.step == step && l.phase == phase && l.tensor == tensor;
  }
};

// By step, within it in the order in which the log names them first.
std::vector<Entry> entries_of(const Log& log) {
  std::vector<Entry> entries;
  std::map<std::tuple<int64_t, std::string, std::string>, size_t> known;
  for (const LogLine& l : log.lines) {
    const auto [at, is_new] = known.try_emplace({l.step, l.phase, l.tensor}, entries.size());
    if (is_new) entries.push_back({l.step, l.phase, l.tensor, {}});
    entries[at->second].lines.push_back(&l);
  }
  std::stable_sort(entries.begin(), entries.end(),
                   [](const Entry& a, const Entry& b) { return a.step < b.step; });
  return entries;
}

// A run that was ended has not written its last step on all ranks: what has fewer records there
// than in an earlier step says nothing. Returns how many tensors that are.
int64_t drop_unfinished(std::vector<Entry>& entries) {
  const int64_t last = entries.back().step;
  std::map<std::pair<std::string, std::string>, size_t> most;
  size_t any = 0;
  for (const Entry& e : entries) {
    size_t& n = most[{e.phase, e.tensor}];
    n = std::max(n, e.lines.size());
    any = std::max(any, e.lines.size());
  }
  const bool first = entries.front().step == last;
  const size_t before = entries.size();
  std::erase_if(entries, [&](const Entry& e) {
    return e.step == last && e.lines.size() < (first ? any : most.at({e.phase, e.tensor}));
  });
  return int64_t(before - entries.size());
}

// How many tensors every earlier step holds, two at least, and the last one lacks. Between two
// steps alone a tensor that is logged once, as those of `init` are, looks the same.
int64_t lacking_at_end(const std::vector<Entry>& entries) {
  const int64_t last = entries.back().step;
  std::set<int64_t> earlier;
  std::map<std::pair<std::string, std::string>, size_t> held;
  for (const Entry& e : entries)
    if (e.step < last) earlier.insert(e.step), ++held[{e.phase, e.tensor}];
  for (const Entry& e : entries)
    if (e.step == last) held.erase({e.phase, e.tensor});
  if (earlier.size() < 2) return 0;
  return std::count_if(held.begin(), held.end(),
                       [&](const auto& h) { return h.second == earlier.size(); });
}

// The last step before this one; -1: none.
int64_t step_before(const std::vector<Entry>& entries, int64_t step) {
  int64_t before = -1;
  for (const Entry& e : entries)
    if (e.step < step) before = std::max(before, e.step);
  return before;
}

// Says where the log ends early, leaves out what is there in part, and returns the last whole step.
int64_t take_end(const Log& log, std::vector<Entry>& entries, LogReport& r) {
  const int64_t last = entries.back().step, lacking = lacking_at_end(entries),
                dropped = drop_unfinished(entries);
  if (!log.truncated.empty()) r.notes.push_back(log.path + ": " + log.truncated);
  if (dropped > 0)
    r.notes.push_back(
        fmt::format("{}: of step {}, {} there on some ranks only and left out: the run "
                    "ended there",
                    log.path, last, number_of(dropped, "tensor")));
  if (lacking > 0)
    r.notes.push_back(
        fmt::format("{}: step {} lacks {} that every step before it holds: the log ends within "
                    "it",
                    log.path, last, number_of(lacking, "tensor")));
  if (log.truncated.empty() && dropped == 0 && lacking == 0) return last;
  r.cut = true;
  return step_before(entries, last);
}

Place part_of(const LogLine& l, char kind) {
  Place p;
  for (size_t i = 0; i < l.axes.size(); ++i)
    if (l.axes[i].second == kind) p.push_back(l.place[i]);
  return p;
}

std::string place_text(const LogLine& l) {
  std::string text;
  for (size_t i = 0; i < l.axes.size(); ++i)
    text += fmt::format("{}{}={}", i ? "," : "", l.axes[i].first, l.place[i]);
  return text;
}

LogFinding finding(const Entry& e, std::string what, std::string means, std::string rank = "") {
  return {e.step, e.phase, e.tensor, std::move(what), std::move(means), std::move(rank)};
}

// The shards beside the first copy, and beside the first of those with numbers of their own.
std::vector<const LogLine*> shards_of(const Entry& e) {
  std::vector<const LogLine*> shards;
  for (const LogLine* l : e.lines)
    if (part_of(*l, 'I') == part_of(*e.lines[0], 'I') &&
        part_of(*l, 'D') == part_of(*e.lines[0], 'D'))
      shards.push_back(l);
  return shards;
}

Digest whole(const Entry& e) {
  Digest total{};
  for (const LogLine* l : shards_of(e)) shardproof_digest_add(&total, &l->digest);
  return total;
}

// How many ranks each axis has, over all steps of a log: in the step that lacks the record of a
// last rank the layout is still that of the others. Where records do not say it, an axis has the
// ranks that any tensor is logged on.
class Layouts {
 public:
  explicit Layouts(const Log& log) : path_(log.path) {
    for (const LogLine& l : log.lines) {
      places_[{l.phase, l.tensor, l.axes}].insert(l.place);
      Place& ranks = ranks_[{l.phase, l.tensor, l.axes}];
      ranks.resize(l.axes.size());
      for (size_t i = 0; i < ranks.size(); ++i) {
        ranks[i] = std::max({ranks[i], l.place[i] + 1, l.ranks[i]});
        int64_t& of_axis = mesh_[l.axes[i].first];
        of_axis = std::max(of_axis, ranks[i]);
      }
    }
  }
  // "tp:S4,dp:I2": the axes with their kinds and ranks.
  std::string text(const Entry& e) const {
    const auto& axes = e.lines[0]->axes;
    return with_ranks(axes, ranks_.at({e.phase, e.tensor, axes}));
  }
  // "dp 2, tp 4"
  std::string mesh() const {
    std::string text;
    for (const auto& [axis, ranks] : mesh_)
      text += fmt::format("{}{} {}", text.empty() ? "" : ", ", axis, ranks);
    return text;
  }
  // Which rank has no record of it; "" where all have. A rank that nobody heard of would be missed
  // by no comparison of those that are there.
  std::string lacking(const Entry& e) const {
    const LogLine& first = *e.lines[0];
    const auto [owed, ranks] = owed_by(first);
    if (int64_t(e.lines.size()) >= owed) return "";
    std::set<Place> there;
    for (const LogLine* l : e.lines) there.insert(l->place);
    LogLine next = first;  // counts through the places up to the first that is not there
    next.place.assign(ranks.size(), 0);
    while (there.contains(next.place))
      for (size_t i = ranks.size(); i-- > 0 && ++next.place[i] == ranks[i];) next.place[i] = 0;
    return fmt::format(
        "--logs: expected a record of each of {} ranks ({}), met step {}, phase {}: {} of {} in "
        "{}, "
        "and that of {} is not there. Put the files of all ranks behind one another; where one "
        "rank logs for an axis, leave that out of axis=",
        owed, with_ranks(first.axes, ranks), e.step, e.phase, e.lines.size(), e.tensor, path_,
        place_text(next));
  }
  // Whether a rank logs it at no step, as without that rank's file: its shard is left out by
  // nobody.
  bool never_logged(const Entry& e) const {
    const LogLine& first = *e.lines[0];
    return int64_t(places_.at({first.phase, first.tensor, first.axes}).size()) <
           owed_by(first).first;
  }

 private:
  std::pair<int64_t, Place> owed_by(const LogLine& first) const {
    std::pair<int64_t, Place> r{1, {}};
    auto& [owed, ranks] = r;
    for (size_t i = 0; i < first.axes.size(); ++i) {
      ranks.push_back(first.ranks[i] > 0 ? first.ranks[i] : mesh_.at(first.axes[i].first));
      if (__builtin_mul_overflow(owed, ranks[i], &owed)) owed = std::numeric_limits<int64_t>::max();
    }
    return r;
  }
  static std::string with_ranks(const decltype(LogLine::axes)& axes, const Place& ranks) {
    std::string text;
    for (size_t i = 0; i < axes.size(); ++i)
      text += fmt::format("{}{}:{}{}", i ? "," : "", axes[i].first, axes[i].second, ranks[i]);
    return text;
  }

  std::string path_;
  std::map<std::string, int64_t> mesh_;
  std::map<std::tuple<std::string, std::string, decltype(LogLine::axes)>, std::set<Place>> places_;
  std::map<std::tuple<std::string, std::string, decltype(LogLine::axes)>, Place> ranks_;
};

bool told_alike(const Entry& e, LogReport& r) {
  std::set<Place> places;
  for (const LogLine* l : e.lines) {
    if (l->axes != e.lines[0]->axes || l->ranks != e.lines[0]->ranks ||
        !l->comparable_with(*e.lines[0])) {
      r.findings.push_back(finding(e,
                                   fmt::format("line {} says another axis, dtype, mode or unit "
                                               "than line {}",
                                               l->number, e.lines[0]->number),
                                   "the ranks do not log the same tensor in the same way",
                                   place_text(*l)));
      return false;
    }
    if (places.insert(l->place).second) continue;
    r.findings.push_back(finding(e, fmt::format("line {} repeats a rank", l->number),
                                 "a rank logs a tensor twice, or two ranks think that they are one",
                                 place_text(*l)));
    return false;
  }
  return true;
}

void judge_copies(const Entry& e, LogReport& r) {
  std::map<std::pair<Place, Place>, std::vector<const LogLine*>> copies;
  for (const LogLine* l : e.lines) copies[{part_of(*l, 'S'), part_of(*l, 'D')}].push_back(l);
  for (const auto& [place, lines] : copies) {
    const LogLine* other = nullptr;  // the first that parts from the majority
    std::map<std::string, size_t> camps;
    for (const LogLine* l : lines) ++camps[text(l->digest)];
    if (camps.size() < 2) continue;
    const auto largest = std::max_element(camps.begin(), camps.end(),
                                          [](auto& a, auto& b) { return a.second < b.second; });
    const std::string right =
        largest->second == camps[text(lines[0]->digest)] ? text(lines[0]->digest) : largest->first;
    for (const LogLine* l : lines)
      if (!other && text(l->digest) != right) other = l;
    r.findings.push_back(
        finding(e, fmt::format("copies part: {} of {} agree", largest->second, lines.size()),
                "a gradient was not summed over the ranks that hold this tensor, or each rank made "
                "its own",
                place_text(*other)));
    return;
  }
}

void judge_own_numbers(const Entry& e, LogReport& r) {
  std::map<std::tuple<Place, Place, std::string>, const LogLine*> known;
  for (const LogLine* l : e.lines) {
    if (part_of(*l, 'D').empty()) return;
    const auto [at, is_new] =
        known.try_emplace({part_of(*l, 'S'), part_of(*l, 'I'), text(l->digest)}, l);
    if (is_new) continue;
    r.findings.push_back(finding(
        e, fmt::format("the same numbers as on {}", place_text(*at->second)),
        "ranks that need numbers of their own draw the same: a dropout mask that repeats on "
        "every shard",
        place_text(*l)));
    return;
  }
}

// Whether the shards of a tensor own the indices 0 .. n-1, each once. What they owe takes a step
// for each index, as many as a record claims: it is computed once for a tensor and size, and a log
// is given as many steps as its own length earns.
class Coverage {
 public:
  explicit Coverage(size_t records) : left_(free_steps + records * steps_of_a_record) {}

  void judge(const Entry& e, LogReport& r) {
    const Digest d = whole(e);
    const uint64_t units = units_of(e, d);
    const Digest* owed = d.elements > most_elements ? nullptr : due(e.lines[0]->hash, units);
    if (!owed) {
      ++left_out_;
      return;
    }
    if (d.coverage[0] == owed->coverage[0] && d.coverage[1] == owed->coverage[1]) return;
    const std::string which = ranges_fault(e, d, units);
    r.findings.push_back(
        finding(e,
                fmt::format("the indices are not 0 to {}, each once{}{}", int64_t(units) - 1,
                            which.empty() ? "" : ": ", which),
                "shards overlap or leave elements out: two ranks own one index, or none does"));
  }

  void note(LogReport& r) const {
    if (left_out_ > 0)
      r.notes.push_back(
          fmt::format("of {} records of a tensor it was not asked whether every index is there "
                      "once: they claim more elements than a log of this length is given time for",
                      left_out_));
  }

 private:
  using Key = std::tuple<uint64_t, uint64_t, uint64_t>;
  static constexpr uint64_t free_steps = 1 << 27, steps_of_a_record = 1 << 17,
                            most_elements = uint64_t(1) << 48;

  static uint64_t units_of(const Entry& e, const Digest& d) {
    const Hash& h = e.lines[0]->hash;
    return h.unit == SHARDPROOF_WORD ? d.elements * shardproof_size(h.dtype) / 8 : d.elements;
  }
  // Null where there is no time left for it.
  const Digest* due(const Hash& h, uint64_t units) {
    const Key key{h.salt[0], h.salt[1], units};
    const auto known = known_.find(key);
    if (known != known_.end()) return &known->second;
    return afford(units) ? &(known_[key] = coverage_of(h, units)) : nullptr;
  }
  bool afford(uint64_t steps) {
    if (steps > left_) return false;
    left_ -= steps;
    return true;
  }

  // Where each shard is a range of indices, as those of the first dim are, it is found by its
  // coverage: what the indices of a window add, which goes from one to the next. Nothing is kept
  // for an index, since a line may claim any number of them.
  std::string ranges_fault(const Entry& e, const Digest& d, uint64_t units) {
    constexpr uint64_t most = 1 << 20;
    const auto shards = shards_of(e);
    if (units > most) return "";
    const auto added_by = [&](uint64_t i) {
      Digest index{};
      shardproof_digest_unit(&index, &e.lines[0]->hash, i, 0);
      return index.coverage[0];
    };
    std::vector<HeldRange> ranges;
    uint64_t n = units;
    for (const LogLine* l : shards) {
      if (l->digest.elements > d.elements) return "";
      const uint64_t own = uint64_t(double(l->digest.elements) * double(units) /
                                    double(std::max<uint64_t>(1, d.elements)));
      if (!afford(own)) return "";
      uint64_t begin = 0, window = 0;
      for (uint64_t i = 0; i < own; ++i) window += added_by(i);
      for (; window != l->digest.coverage[0]; ++begin) {
        if (begin + own >= 2 * units || !afford(2)) return "";
        window += added_by(begin + own) - added_by(begin);
      }
      n = std::max(n, begin + own);
      ranges.push_back({place_text(*l), int64_t(begin), int64_t(begin + own)});
    }
    return cover_fault(e.tensor, int64_t(n), ranges);
  }

  uint64_t left_;
  int64_t left_out_ = 0;
  std::map<Key, Digest> known_;
};

void judge_numbers(const Entry& e, LogReport& r) {
  for (const LogLine* l : e.lines)
    if (l->digest.nans + l->digest.infinities > 0) {
      r.findings.push_back(
          finding(e,
                  fmt::format("{} NaN and {} infinite of {} elements", l->digest.nans,
                              l->digest.infinities, l->digest.elements),
                  "numbers are no longer finite", place_text(*l)));
      return;
    }
}

void judge_entry(const Entry& e, const Layouts& layouts, Coverage& coverage, LogReport& r) {
  if (!told_alike(e, r)) return;
  if (r.refused.empty()) r.refused = telling::printable(layouts.lacking(e));
  judge_copies(e, r);
  judge_own_numbers(e, r);
  if (!layouts.never_logged(e)) coverage.judge(e, r);
  judge_numbers(e, r);
}

// ---- Two logs

struct Pair {
  Digest a{}, b{};
  std::string rank;  // place on the axes; "" where wholes are compared
};

// What a record says beside its digest belongs to it: equal values have equal counts.
bool alike(const Digest& a, const Digest& b) {
  return same(a, b) && a.elements == b.elements && a.nans == b.nans &&
         a.infinities == b.infinities && a.negative_zeros == b.negative_zeros;
}
std::string counts_text(const Digest& d) {
  return fmt::format("{} elements, {} NaN, {} infinite, {} -0", d.elements, d.nans, d.infinities,
                     d.negative_zeros);
}

// In one layout rank by rank, copies too; else what the shards make together.
Pair first_apart(const Entry& a, const Entry& b, bool one_layout) {
  if (!one_layout) return {whole(a), whole(b), ""};
  std::map<Place, const LogLine*> in_b;
  for (const LogLine* l : b.lines) in_b[l->place] = l;
  for (const LogLine* l : a.lines)
    if (const auto at = in_b.find(l->place);
        at != in_b.end() && !alike(l->digest, at->second->digest))
      return {l->digest, at->second->digest, place_text(*l)};
  return {};
}

// The first record of `here` that `there` lacks; nullptr: none.
const LogLine* first_lacking(const Entry& here, const Entry& there) {
  std::set<Place> places;
  for (const LogLine* l : there.lines) places.insert(l->place);
  for (const LogLine* l : here.lines)
    if (!places.contains(l->place)) return l;
  return nullptr;
}

using TensorOfPhase = std::pair<std::string, std::string>;

// What of `here` is missing in `there`, in a step that both hold: a tensor that `there` logs at
// other steps. In its last step it may have been ended before that record.
void note_lacking_tensors(const Log& log_here, const std::vector<Entry>& here, const Log& log_there,
                          const std::vector<Entry>& there, LogReport& r) {
  std::set<TensorOfPhase> logged;
  std::set<int64_t> steps;
  std::set<std::tuple<int64_t, std::string, std::string>> known;
  for (const Entry& e : there) {
    logged.insert({e.phase, e.tensor});
    steps.insert(e.step);
    known.insert({e.step, e.phase, e.tensor});
  }
  int64_t last = 0, missing = 0;
  for (const LogLine& l : log_there.lines) last = std::max(last, l.step);
  for (const Entry& e : here) {
    if (e.step > last || known.contains({e.step, e.phase, e.tensor})) continue;
    ++missing;
    if (e.step == last && logged.contains({e.phase, e.tensor})) {
      r.cut = true;
      r.proven = std::min(r.proven, step_before(there, last));
    }
    if (r.refused.empty() && e.step < last && steps.contains(e.step) &&
        logged.contains({e.phase, e.tensor}))
      r.refused = telling::printable(fmt::format(
          "--logs: expected the same records in both, met step {}, phase {}: {} of {} is not in {}",
          e.step, e.phase, e.tensor, log_here.path, log_there.path));
  }
  if (missing > 0)
    r.notes.push_back(
        fmt::format("{} records of {} are not in {}", missing, log_here.path, log_there.path));
}

// Values that were only moved owe equal bits in every layout, and so do integers.
bool may_round(const Entry& e) {
  return e.phase != "init" && e.phase != "input" && e.lines[0]->hash.dtype <= SHARDPROOF_F16;
}

int64_t steps_in(const std::vector<Entry>& entries) {
  std::set<int64_t> steps;
  for (const Entry& e : entries) steps.insert(e.step);
  return int64_t(steps.size());
}

std::string named(const LogFinding& f) {
  return fmt::format("step {}, phase {}, tensor {}{}", f.step, f.phase, f.tensor,
                     f.rank.empty() ? "" : ", " + f.rank);
}

std::string files_text(const std::vector<Log>& logs) {
  std::string text;
  for (const Log& l : logs) text += (text.empty() ? "" : " ") + l.path;
  return text;
}

}  // namespace

bool LogLine::comparable_with(const LogLine& o) const {
  return hash.dtype == o.hash.dtype && hash.mode == o.hash.mode && hash.unit == o.hash.unit;
}

Log parse_log(const std::string& text, const std::string& path) {
  Log log;
  log.path = path;
  size_t at = 0;
  for (int64_t number = 1; at < text.size(); ++number) {
    const size_t end = text.find('\n', at);
    const std::string line = text.substr(at, end - at);  // to the end where there is no other
    if (const std::string what = packed_or_recoded(line); !what.empty())
      throw BadInput(fmt::format("{}:{}:1: expected step=..., met {}", path, number, what));
    if (line.ends_with('\r'))
      throw BadInput(fmt::format(
          "{}:{}:{}: expected lines that end with LF, met {}", path, number, line.size(),
          end == std::string::npos ? "lines that end with CR: tr '\\r' '\\n' < LOG > NEW"
                                   : "a line that ends with CR LF: tr -d '\\r' < LOG > NEW"));
    if (end == std::string::npos) {
      log.truncated = fmt::format(
          "the last line ends after {} bytes without a line end; read up to line {}, the last "
          "whole record",
          text.size() - at, number - 1);
      break;
    }
    if (end > at) log.lines.push_back(LineReader(path, number).read(line));
    at = end + 1;
  }
  if (log.lines.empty())
    throw BadInput(fmt::format("{}:1:1: expected a digest log, one record a line, met {}", path,
                               text.empty() ? "an empty file" : "no whole record"));
  return log;
}

Log read_log(const std::string& path) {
  // A pipe of that name would wait for its writer.
  std::error_code ignored;
  if (const auto status = std::filesystem::status(path, ignored);
      std::filesystem::exists(status) && !std::filesystem::is_regular_file(status))
    throw BadInput(fmt::format("--logs: expected a regular file, met '{}', which is {}", path,
                               std::filesystem::is_directory(status) ? "a folder" : "none"));
  errno = 0;
  std::ifstream in(path, std::ios::binary);
  std::ostringstream text;
  if (in) text << in.rdbuf();
  if (!in)
    throw BadInput(fmt::format("--logs: expected a file that can be read, met '{}'{}", path,
                               errno ? fmt::format(" ({})", std::strerror(errno)) : ""));
  return parse_log(text.str(), path);
}

LogReport judge_log(const Log& log) {
  LogReport r;
  auto entries = entries_of(log);
  r.proven = take_end(log, entries, r);
  r.tensors = int64_t(entries.size());
  r.steps = steps_in(entries);
  const Layouts layouts(log);
  r.mesh = layouts.mesh();
  r.one_rank = std::all_of(entries.begin(), entries.end(),
                           [](const Entry& e) { return e.lines.size() == 1; });
  Coverage coverage(log.lines.size());
  for (const Entry& e : entries) judge_entry(e, layouts, coverage, r);
  coverage.note(r);
  return r;
}

namespace {

class Comparison {
 public:
  Comparison(const Log& a, const Log& b, bool exact)
      : a_(a), b_(b), exact_(exact), of_a_(entries_of(a)), of_b_(entries_of(b)) {}

  LogReport made() {
    r_.proven = take_end(a_, of_a_, r_);
    r_.proven = std::min(r_.proven, take_end(b_, of_b_, r_));
    r_.steps = std::min(steps_in(of_a_), steps_in(of_b_));
    r_.mesh = in_a_.mesh() == in_b_.mesh() ? in_a_.mesh() : in_a_.mesh() + " and " + in_b_.mesh();
    if (end_of_a_ != end_of_b_) {
      r_.cut = true;
      r_.notes.push_back(
          fmt::format("{} ends at step {}, {} at step {}", a_.path, end_of_a_, b_.path, end_of_b_));
    }
    std::map<std::tuple<int64_t, std::string, std::string>, const Entry*> in_b;
    for (const Entry& e : of_b_) in_b[{e.step, e.phase, e.tensor}] = &e;
    for (const Entry& e : of_a_) {
      const auto found = in_b.find({e.step, e.phase, e.tensor});
      if (found == in_b.end()) {
        judge(e, a_, in_a_);
        continue;
      }
      ++r_.tensors;
      const size_t before = r_.findings.size();
      compare(e, *found->second);
      // What both logs show is told once.
      if (r_.findings.size() == before) judge(e, a_, in_a_);
      if (r_.findings.size() == before) judge(*found->second, b_, in_b_);
      in_b.erase(found);
    }
    for (const Entry& e : of_b_)
      if (in_b.contains({e.step, e.phase, e.tensor})) judge(e, b_, in_b_);
    coverage_.note(r_);
    std::stable_sort(r_.findings.begin(), r_.findings.end(),
                     [](const LogFinding& x, const LogFinding& y) { return x.step < y.step; });
    note_lacking_tensors(a_, of_a_, b_, of_b_, r_);
    note_lacking_tensors(b_, of_b_, a_, of_a_, r_);
    if (r_.tensors == 0)
      throw BadInput(
          fmt::format("--logs: expected two logs of the same tensors, met {} and {}, "
                      "which share no step, phase and tensor",
                      a_.path, b_.path));
    return std::move(r_);
  }

 private:
  // As the only log there is.
  void judge(const Entry& e, const Log& log, const Layouts& layouts) {
    const size_t before = r_.findings.size();
    judge_entry(e, layouts, coverage_, r_);
    for (size_t i = before; i < r_.findings.size(); ++i)
      r_.findings[i].what = log.path + ": " + r_.findings[i].what;
  }

  void refuse(std::string why) {
    if (r_.refused.empty()) r_.refused = telling::printable(why);
  }
  void require_places(const Entry& here, const Log& log_here, const Entry& there,
                      const Log& log_there) {
    if (const LogLine* l = first_lacking(here, there))
      refuse(
          fmt::format("--logs: expected the same records in both, met step {}, phase {}: {} of "
                      "{} is in {} and not in {}. Each of two logs is a run: put the files of "
                      "its ranks behind one another",
                      l->step, l->phase, place_text(*l), l->tensor, log_here.path, log_there.path));
  }

  void compare(const Entry& e, const Entry& other) {
    if (!e.lines[0]->comparable_with(*other.lines[0])) {
      r_.findings.push_back(finding(e, "the logs hash it in another dtype, mode or unit",
                                    "digests of different kinds say nothing about each other"));
      return;
    }
    const std::string of_layout = in_a_.text(e), of_other = in_b_.text(other);
    const bool one_layout = of_layout == of_other;
    if (one_layout) {
      require_places(e, a_, other, b_);
      require_places(other, b_, e, a_);
    }
    const auto [x, y, rank] = first_apart(e, other, one_layout);
    if (one_layout ? alike(x, y) : same(x, y)) return;
    if (e.step == end_of_a_ && x.elements < y.elements &&
        may_have_ended_within(e, other, a_, of_a_))
      return;
    if (e.step == end_of_b_ && y.elements < x.elements &&
        may_have_ended_within(other, e, b_, of_b_))
      return;
    if (!exact_ && x.elements == y.elements && !one_layout && may_round(e)) {
      refuse(fmt::format(
          "--logs: expected runs of one layout, or values that owe equal bits in any (phase init "
          "or input, integers, exact sums said by --exact), met step {}, phase {}, tensor {} as "
          "{} in {} and {} in {}: sums in another order round to other bits, so that their "
          "digests differ in right runs too",
          e.step, e.phase, e.tensor, of_layout, a_.path, of_other, b_.path));
      return;
    }
    const auto told = [&, &x = x, &y = y](const Digest& d) {
      return same(x, y) ? counts_text(d) : text(d);
    };
    r_.findings.push_back(
        finding(e, fmt::format("{} {}, {} {}", a_.path, told(x), b_.path, told(y)),
                x.elements != y.elements
                    ? fmt::format("the runs do not hold the same tensor: {} and {} elements",
                                  x.elements, y.elements)
                : same(x, y) ? "equal digests with other counts: a record is not as it was written"
                : may_round(e) && !exact_
                    ? "the runs part here; everything that the logs hold before it is equal. Logs "
                      "do not tell settings: runs that add in another order (sp, microbatches, "
                      "another library) part in right programs too"
                    : "the runs part here; everything that the logs hold before it is equal",
                rank));
  }

  // A log whose last step holds a tensor on fewer ranks than the other, and what it holds is what
  // these hold there, may end within it.
  bool may_have_ended_within(const Entry& e, const Entry& whole, const Log& log,
                             const std::vector<Entry>& of_log) {
    const auto [x, y, rank] = first_apart(e, whole, /*one_layout=*/true);
    if (first_lacking(e, whole) || !alike(x, y)) return false;
    r_.cut = true;
    r_.proven = std::min(r_.proven, step_before(of_log, e.step));
    r_.notes.push_back(
        fmt::format("{}: step {}, its last, holds {} of {} records of {} in phase {}: the log may "
                    "end within it",
                    log.path, e.step, e.lines.size(), whole.lines.size(), e.tensor, e.phase));
    return true;
  }

  const Log &a_, &b_;
  const bool exact_;
  std::vector<Entry> of_a_, of_b_;
  const int64_t end_of_a_ = of_a_.back().step, end_of_b_ = of_b_.back().step;
  const Layouts in_a_{a_}, in_b_{b_};
  Coverage coverage_{a_.lines.size() + b_.lines.size()};
  LogReport r_;
};

}  // namespace

LogReport compare_logs(const Log& a, const Log& b, bool exact) {
  return Comparison(a, b, exact).made();
}

std::string log_text(const LogReport& r, const std::vector<Log>& logs) {
  std::string text;
  if (r.findings.empty() && r.cut) {
    text = fmt::format(
        "NO JUDGEMENT {}   {}; what follows is not there to be judged   {} compared\n",
        files_text(logs),
        r.proven < 0 ? "no step is there whole" : fmt::format("no drift up to step {}", r.proven),
        number_of(r.tensors, "tensor"));
  } else if (r.findings.empty() && r.one_rank) {
    text = fmt::format(
        "NO JUDGEMENT {}   one rank wrote it: there is no copy to compare and no shard to add\n",
        files_text(logs));
  } else if (r.findings.empty()) {
    text = fmt::format("NO DRIFT   {}   {}, {} compared, ranks: {}\n", files_text(logs),
                       number_of(r.steps, "step"), number_of(r.tensors, "tensor"), r.mesh);
  } else {
    const LogFinding& f = r.findings[0];
    text = fmt::format("DRIFT      {}    step {}, {}: {}\n", files_text(logs), f.step, f.phase,
                       f.tensor);
    text += fmt::format("{:<10} {}   {}\n{:<10} {}\n", "at", named(f), f.what, "means", f.means);
    if (r.findings.size() > 1)
      text += fmt::format("{:<10} {} more, next: {}\n", "also", r.findings.size() - 1,
                          named(r.findings[1]));
  }
  if (!r.refused.empty()) text += fmt::format("{:<10} {}\n", "left out", r.refused);
  for (const std::string& note : r.notes) text += fmt::format("{:<10} {}\n", "note", note);
  return telling::printable(text);  // names are whatever the log holds
}

std::string log_json(const LogReport& r, const std::vector<Log>& logs) {
  const LogFinding* f = r.findings.empty() ? nullptr : &r.findings[0];
  std::vector<std::string> notes, paths;
  for (const std::string& n : r.notes) notes.push_back(json_text(n));
  for (const Log& l : logs) paths.push_back(json_text(l.path));
  auto known = [&](const std::string& value) { return f ? value : std::string("null"); };
  const LogFinding none, &g = f ? *f : none;
  return fmt::format(
      "{{\n  \"schema\": 1,\n  \"logs\": [{}],\n  \"complete\": {},\n  \"proven_to\": {},\n  "
      "\"drift\": {},\n  \"first_step\": {},\n  "
      "\"phase\": {},\n  \"parameter\": {},\n  \"rank\": {},\n  \"index\": [],\n  \"what\": {},\n  "
      "\"means\": {},\n  \"findings\": {},\n  \"ranks\": {},\n  \"steps\": {},\n  \"notes\": "
      "[{}]\n}}\n",
      joined(paths, ", "), !r.cut, r.proven < 0 ? "null" : std::to_string(r.proven),
      f                     ? "true"
      : r.cut || r.one_rank ? "null"
                            : "false",
      known(std::to_string(g.step)), known(json_text(g.phase)), known(json_text(g.tensor)),
      g.rank.empty() ? "null" : json_text(g.rank), known(json_text(g.what)),
      known(json_text(g.means)), r.findings.size(), json_text(r.mesh), r.steps,
      joined(notes, ", "));
}

}  // namespace shardproof::digest
