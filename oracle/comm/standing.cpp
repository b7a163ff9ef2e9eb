// Where ranks stand, in words.
#include "oracle/comm/standing.hpp"

#include "oracle/joined.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <map>

namespace shardproof {
namespace {

bool consecutive(std::span<const int> ranks) {
  for (size_t i = 1; i < ranks.size(); ++i) {
    if (ranks[i] != ranks[0] + int(i)) return false;
  }
  return true;
}

std::vector<int> members_of(const Trace& t) {
  const int size = std::clamp<int>(t.group_size, 0, int(std::size(t.members)));
  return {t.members, t.members + size};
}

// Peers of a shift as world ranks: "-> 3 <- 1".
std::string peers(int rank, const Trace& t) {
  const std::vector<int> members = members_of(t);
  const auto own = std::find(members.begin(), members.end(), rank);
  if (own == members.end()) return "";
  const int p = int(members.size()), me = int(own - members.begin());
  const auto at = [&](int64_t place) { return members[size_t(((place % p) + p) % p)]; };
  return fmt::format(" -> {} <- {}", at(int64_t(me) + t.hop), at(int64_t(me) - t.hop));
}

}  // namespace

std::string hung_text(int stopped_by) {
  return stopped_by
             ? fmt::format("was stopped by {} and nobody continued it", signal_name(stopped_by))
             : "made no progress until its deadline";
}

std::string signal_name(int signal) {
  const char* abbreviation = ::sigabbrev_np(signal);
  return abbreviation ? fmt::format("SIG{}", abbreviation) : fmt::format("signal {}", signal);
}

std::string signal_text(int signal) {
  const bool has_name = ::sigabbrev_np(signal) != nullptr;
  return has_name ? fmt::format("signal {} ({})", signal, signal_name(signal))
                  : signal_name(signal);
}

std::string rank_list(std::span<const int> ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + joined(ranks);
}

std::string member_text(std::span<const int> ranks) {
  if (ranks.size() > 2 && consecutive(ranks)) {
    return fmt::format("{{{}-{}}}", ranks.front(), ranks.back());
  }
  return fmt::format("{{{}}}", joined(ranks, ","));
}

__attribute__((no_sanitize_thread)) Trace snapshot(const Trace& t) {
  Trace copy;
  const auto* from = reinterpret_cast<const volatile char*>(&t);
  auto* to = reinterpret_cast<volatile char*>(&copy);
  for (size_t i = 0; i < sizeof(Trace); ++i) to[i] = from[i];
  copy.label[sizeof(copy.label) - 1] = copy.site[sizeof(copy.site) - 1] = 0;
  return copy;
}

std::string last_call(int rank, const Trace& t) {
  if (t.group_size == 0) return "";
  std::string text = name(t.op);
  if (t.reduce != Reduce::none) text += fmt::format(" {}", name(t.reduce));
  if (t.op == Op::shift) text += peers(rank, t);
  if (t.op == Op::broadcast) text += fmt::format(" from member {}", t.hop);
  if (t.op != Op::barrier) text += fmt::format(", {} x {}", t.count, name(t.dtype));
  text += fmt::format(", {}{}", t.label, member_text(members_of(t)));
  if (t.site[0]) text += fmt::format(", at {}", t.site);
  return text;
}

std::string standing(int rank, const Trace& t, bool plural) {
  const std::string call = last_call(rank, t), phase = name(t.phase);
  const uint32_t number = t.calls_in_phase;
  switch (t.state) {
    case Trace::waiting:
      return fmt::format("{} in call {} of {}: {}", plural ? "wait" : "waits", number, phase, call);
    case Trace::left:
      return call.empty() ? "left before any call"
                          : fmt::format("left {} after call {}; last: {}", phase, number, call);
    case Trace::dead:
      return call.empty() ? "died before any call"
                          : fmt::format("died in {} after call {}; last: {}", phase, number, call);
    case Trace::running:
      break;
  }
  const char* verb = plural ? "compute" : "computes";
  return call.empty() ? fmt::format("{}, no call so far", verb)
                      : fmt::format("{} in {} after call {}; last: {}", verb, phase, number, call);
}

std::string standings(const std::vector<Trace>& by_rank) {
  std::vector<std::pair<std::string, std::vector<int>>> alike;
  for (int rank = 0; rank < int(by_rank.size()); ++rank) {
    const std::string text = standing(rank, by_rank[size_t(rank)]);
    const auto same =
        std::find_if(alike.begin(), alike.end(), [&](auto& a) { return a.first == text; });
    if (same == alike.end()) {
      alike.push_back({text, {rank}});
    } else {
      same->second.push_back(rank);
    }
  }
  std::string lines;
  for (const auto& [text, ranks] : alike) {
    const int first = ranks.front();
    lines += fmt::format("{}{} {}", lines.empty() ? "" : "\n", rank_list(ranks),
                         standing(first, by_rank[size_t(first)], ranks.size() > 1));
  }
  return lines;
}

std::string place(const Trace& t) {
  if (t.group_size == 0) return "before its first call";
  return t.state == Trace::waiting
             ? fmt::format("in call {} of {}", t.calls_in_phase, name(t.phase))
             : fmt::format("in {}, after call {}", name(t.phase), t.calls_in_phase);
}

}  // namespace shardproof
