// `shardproof explain LINE`: what a line would do, computed from its contract; nothing runs.
//
// What a parameter owes follows from the types: a gradient is typed by the dual of the parameter's
// layout, so R leaves a partial sum (P) on its axis that the training step has to add up, while I
// and S leave nothing: where a rank has seen its own share only, the layer has summed I itself.
#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <set>

#include "fixtures/fills.hpp"
#include "fixtures/sharding.hpp"
#include "oracle/check.hpp"
#include "oracle/checks/draws.hpp"
#include "oracle/comm/ledger.hpp"
#include "oracle/command.hpp"
#include "oracle/cost.hpp"
#include "oracle/due.hpp"
#include "oracle/joined.hpp"
#include "oracle/overflow.hpp"
#include "oracle/printable.hpp"
#include "oracle/report_parts.hpp"
#include "oracle/run.hpp"
#include "oracle/words.hpp"

namespace shardproof {

namespace {

using telling::row;

// {0-3}, {0,4}: members with runs of three and more folded.
std::string braces(const std::vector<int>& members) {
  std::string text;
  for (size_t i = 0; i < members.size();) {
    size_t end = i + 1;
    while (end < members.size() && members[end] == members[end - 1] + 1) ++end;
    if (end - i < 3) end = i + 1;
    if (!text.empty()) text += ',';
    text += end - i == 1 ? std::to_string(members[i])
                         : fmt::format("{}-{}", members[i], members[end - 1]);
    i = end;
  }
  return "{" + text + "}";
}

std::string groups_text(const std::vector<std::vector<int>>& groups) {
  constexpr size_t most = 16;
  std::string text;
  for (size_t i = 0; i < std::min(groups.size(), most); ++i) text += " " + braces(groups[i]);
  if (groups.size() > most) text += fmt::format(" ... ({} groups)", groups.size());
  return text.substr(1);
}

std::string bytes_text(double bytes) {
  const char* units[] = {"B", "KiB", "MiB", "GiB", "TiB", "PiB"};
  int unit = 0;
  while (bytes >= 1024 && unit < 5) bytes /= 1024, ++unit;
  return fmt::format("{:.5g} {}", bytes, units[unit]);
}

// Equal texts of ranks folded: "[24,12]", or "[6,8] on {0-2}, [5,8] on {3}".
template <class TextOfRank>
std::vector<std::pair<std::string, std::vector<int>>> folded(int world, TextOfRank text) {
  std::vector<std::pair<std::string, std::vector<int>>> kinds;
  for (int r = 0; r < world; ++r) {
    std::string of_rank = text(r);
    auto same = std::find_if(kinds.begin(), kinds.end(),
                             [&](const auto& kind) { return kind.first == of_rank; });
    if (same == kinds.end())
      kinds.push_back({of_rank, {r}});
    else
      same->second.push_back(r);
  }
  return kinds;
}

bool crosses_nodes(const std::vector<int>& group, int ranks_of_a_node) {
  return std::any_of(group.begin(), group.end(),
                     [&](int r) { return r / ranks_of_a_node != group[0] / ranks_of_a_node; });
}

// Ranks fill the nodes in world order. Of the groups of one axis some may cross and others not.
std::string crossing_text(const std::vector<std::vector<int>>& groups, int ranks_of_a_node) {
  std::vector<std::vector<int>> crossing;
  for (const auto& g : groups)
    if (crosses_nodes(g, ranks_of_a_node)) crossing.push_back(g);
  if (crossing.empty()) return "within a node";
  return crossing.size() == groups.size() ? "crosses nodes"
                                          : "crosses nodes: " + groups_text(crossing);
}

// Said early, since a kernel is written otherwise then.
std::string of_one_call(const Contract& c) {
  return c.backward ? "" : " (no backward: every result is one of the forward)";
}

std::string mesh_text(const Case& line, const Mesh& mesh, int nodes) {
  std::string text =
      row("world", number_of(mesh.world(), "rank") + ", order " + line.text("order"));
  if (nodes > 0) {
    text.pop_back();
    text += fmt::format(", {} nodes of {}\n", nodes, mesh.world() / nodes);
  }
  for (Axis a : mesh.order()) {
    if (mesh.size(a) == 1) continue;
    auto groups = mesh.groups({a});
    std::string where;
    if (nodes > 0) where = "   " + crossing_text(groups, mesh.world() / nodes);
    text += row("groups", fmt::format("{:<4} {}{}", name(a), groups_text(groups), where));
  }
  if (mesh.size(Axis::rep) > 1)
    for (Axis a : {Axis::kv, Axis::rep})
      text += row("groups",
                  fmt::format("{:<4} {}   part of tp: {}", name(a), groups_text(mesh.groups({a})),
                              a == Axis::kv ? "other key heads" : "the same key heads"));
  return text;
}

std::string local_shapes(const Operand& o, const Mesh& mesh) {
  auto kinds = folded(mesh.world(),
                      [&](int r) { return shape_text(local_shape(o.shape, o.layout, mesh, r)); });
  if (kinds.size() == 1) return kinds[0].first;
  std::string text;
  for (const auto& [shape, ranks] : kinds)
    text += fmt::format("{}{} on {}", text.empty() ? "" : ", ", shape, braces(ranks));
  return text;
}

// The layout on the axes that have ranks.
std::string layout_text(Layout layout, const Mesh& mesh) {
  std::erase_if(layout, [&](const auto& on) { return mesh.size(on.first) == 1; });
  return layout.empty() ? "whole" : text(layout);
}

std::string operands_text(const std::vector<Operand>& operands, const Mesh& mesh) {
  std::string text = row("operands", fmt::format("{:<10} {:<8} {:<14} {:<18} {}", "", "",
                                                 "global shape", "layout", "local shape"));
  for (const Operand& o : operands)
    text +=
        row("", fmt::format("{:<10} {:<8} {:<14} {:<18} {}{}", role_name(o.role), o.name,
                            shape_text(o.shape), layout_text(o.layout, mesh), local_shapes(o, mesh),
                            o.role != Operand::output && !o.gradient ? "   no gradient" : ""));
  return text;
}

// Equal products, as those of iterations, share a row.
std::string products_text(const Contract& contract, const Case& line, bool backward, int rank) {
  std::vector<std::pair<std::string, int>> products;
  for (const Gemm& g : contract.gemms(line, rank)) {
    if (g.backward != backward) continue;
    const std::string text = fmt::format("multiply   {:<24} M={} N={} K={}", g.what, g.m, g.n, g.k);
    const auto same = std::find_if(products.begin(), products.end(),
                                   [&](const auto& product) { return product.first == text; });
    if (same == products.end())
      products.push_back({text, 1});
    else
      ++same->second;
  }
  std::string lines;
  for (const auto& [text, count] : products)
    lines += row("", count == 1 ? text : fmt::format("{}   {} times", text, count));
  return lines;
}

std::string gemms_text(const Contract& contract, const Case& line, bool backward) {
  if (!contract.gemms) return "";
  std::string text;
  for (const auto& [products, ranks] : folded(
           line.world(), [&](int rank) { return products_text(contract, line, backward, rank); })) {
    if (products.empty()) continue;
    if (int(ranks.size()) != line.world()) text += row("", "on " + braces(ranks));
    text += products;
  }
  return text;
}

std::vector<int> members_of(const std::string& label, const Mesh& mesh, int rank);

// "cp/2": the run of 2 ranks of cp that the rank is in; "cp%2": the ranks at its place of all runs.
std::vector<int> members_of_runs(const std::string& label, size_t mark, const Mesh& mesh,
                                 int rank) {
  const auto all = members_of(label.substr(0, mark), mesh, rank);
  const auto u = size_t(std::atoi(label.c_str() + mark + 1)),
             me = size_t(std::find(all.begin(), all.end(), rank) - all.begin());
  std::vector<int> members;
  if (u == 0) return members;
  for (size_t i = 0; i < all.size(); ++i)
    if (label[mark] == '/' ? i / u == me / u : i % u == me % u) members.push_back(all[i]);
  return members;
}

// Members of a call's group through a rank; empty for groups that are no product of axes.
std::vector<int> members_of(const std::string& label, const Mesh& mesh, int rank) {
  if (const size_t mark = label.find_first_of("/%"); mark != std::string::npos)
    return members_of_runs(label, mark, mesh, rank);
  if (label == name(Axis::rep)) return mesh.group({Axis::rep}, rank);
  if (const size_t mark = label.find(":ends"); mark != std::string::npos) {
    const auto all = members_of(label.substr(0, mark), mesh, rank);
    return all.size() > 2 ? std::vector{all.front(), all.back()} : all;
  }
  std::vector<Axis> axes;
  std::string word;
  for (char c : (label == "world" ? "" : label) + ",") {
    if (c != ',') {
      word += c;
      continue;
    }
    auto axis = axis_from(word);
    if (!axis && label != "world") return {};
    if (axis) axes.push_back(*axis);
    word.clear();
  }
  return mesh.group(label == "world" ? mesh.order() : axes, rank);
}

// Bytes of one call or of several: of this rank, and what a ring sends in the rank's group.
struct Volume {
  int64_t logical = 0, ring_total = 0;
  double ring_of_rank = 0;  // mean of the group
  bool known = true;
};

Volume volume_of(const Traffic& t, const std::vector<int>& members) {
  if (members.empty()) return {0, 0, 0, false};
  LedgerEntry entry;
  entry.op = t.op, entry.reduce = t.reduce, entry.dtype = t.dtype, entry.count = t.count;
  entry.label = t.label, entry.members = members;
  Volume v;
  v.logical = logical_bytes(entry);
  v.ring_total = ring_bytes_total(t.op, v.logical, int(members.size()));
  v.ring_of_rank = double(v.ring_total) / double(members.size());
  return v;
}

std::string volume_text(const Volume& v) {
  return v.known ? fmt::format("logical {}, ring {} a rank", bytes_text(double(v.logical)),
                               bytes_text(v.ring_of_rank))
                 : "";
}

// Messages one after another in a ring of p: p-1 for a gather, a scatter or an exchange, twice that
// for an all-reduce, one for a shift.
int64_t rounds_of(Op op, int64_t p) {
  if (op == Op::shift) return 1;
  return op == Op::all_reduce ? 2 * (p - 1) : p - 1;
}

// Room for what travels in a phase: the larger side of each call, and for shifts two buffers that
// change places. A message is home after at most p hops, so that more hops are more messages.
class Messages {
 public:
  void add(const Traffic& t, const Volume& v, int64_t p) {
    if (t.op != Op::shift) {
      bytes_ += v.logical;
    } else if (hops_[{t.label, t.dtype, t.count}]++ % p == 0) {
      bytes_ += 2 * v.logical;
    }
  }
  int64_t bytes() const { return bytes_; }

 private:
  std::map<std::tuple<std::string, DType, int64_t>, int64_t> hops_;
  int64_t bytes_ = 0;
};

std::string call_name(const Traffic& t) {
  std::string text = name(t.op);
  if (t.reduce != Reduce::none) text += fmt::format(" {}", name(t.reduce));
  if (t.op == Op::shift) text += fmt::format(" {:+}", t.hop);
  return text;
}

// The calls of one phase on one rank, in order, and their sum.
std::string calls_of_rank(const std::vector<Traffic>& due, bool backward, const Mesh& mesh,
                          int rank) {
  std::string text;
  Volume sum;
  Messages messages;
  int64_t rounds = 0;
  int calls = 0;
  for (const Traffic& t : due) {
    if (t.backward != backward || (t.rank >= 0 && t.rank != rank)) continue;
    const auto members = members_of(t.label, mesh, rank);
    Volume v = volume_of(t, members);
    const int64_t p = std::max<int64_t>(1, int64_t(members.size()));
    messages.add(t, v, p);
    rounds += rounds_of(t.op, p);
    sum.logical += v.logical, sum.ring_of_rank += v.ring_of_rank;
    sum.known = sum.known && v.known;
    text += row("", fmt::format("call {:<3} {:<20} {:<6} {:<14} {}{}", ++calls, call_name(t),
                                t.label, fmt::format("{} x {}", t.count, name(t.dtype)),
                                volume_text(v), t.once_a_step ? ", once a step" : ""));
  }
  if (calls == 0) return row("", "no call");
  if (calls == 1 || !sum.known) return text;
  const std::string all = fmt::format("{} calls, {} rounds, buffers {}", calls, rounds,
                                      bytes_text(double(messages.bytes())));
  return text + row("", fmt::format("{:<50} {}", all, volume_text(sum)));
}

// What the groups of a label move in a phase: calls of a rank, and ring bytes of a whole group.
struct Moved {
  int calls = 0;
  int64_t bytes = 0;
  bool operator==(const Moved&) const = default;
};

// The groups behind a label, each with what it moves, told by the first member that has a call; in
// a shift every member sends a payload of its own.
struct GroupTraffic {
  std::string label;
  std::vector<int> members;
  int teller = 0;
  Moved forward, backward;

  void add(const Traffic& t, int rank) {
    Moved& moved = t.backward ? backward : forward;
    const Volume v = volume_of(t, members);
    moved.calls += rank == teller;
    if (t.op == Op::shift)
      moved.bytes += v.logical;
    else if (rank == teller)
      moved.bytes += v.ring_total;
  }
};

std::vector<GroupTraffic> group_traffic(const Contract& contract, const Case& line,
                                        const Declared& declared) {
  const Mesh mesh = line.mesh();
  std::vector<GroupTraffic> all;
  std::map<std::pair<std::string, std::vector<int>>, size_t> known;
  for (int rank = 0; rank < mesh.world(); ++rank)
    for (const Traffic& t : traffic_due(contract, declared, line, rank)) {
      if (t.rank >= 0 && t.rank != rank) continue;
      const std::vector<int> members = members_of(t.label, mesh, rank);
      if (members.empty()) continue;
      const auto [at, fresh] = known.try_emplace({t.label, members}, all.size());
      if (fresh) all.push_back({t.label, members, rank, {}, {}});
      all[at->second].add(t, rank);
    }
  return all;
}

std::string moved_text(const Moved& m) {
  return number_of(m.calls, "call") + " " + bytes_text(double(m.bytes));
}

// Groups that cross nodes, and groups that do not, with the bytes that each of them moves.
std::string nodes_text(const Contract& contract, const Case& line, const Declared& declared,
                       int nodes) {
  if (nodes == 0) return "";
  const int ranks_of_a_node = line.world() / nodes;
  std::vector<std::pair<GroupTraffic, std::vector<std::vector<int>>>> kinds;
  for (const GroupTraffic& g : group_traffic(contract, line, declared)) {
    auto same = std::find_if(kinds.begin(), kinds.end(), [&](const auto& kind) {
      const GroupTraffic& k = kind.first;
      return k.label == g.label && k.forward == g.forward && k.backward == g.backward &&
             crosses_nodes(k.members, ranks_of_a_node) == crosses_nodes(g.members, ranks_of_a_node);
    });
    if (same == kinds.end())
      kinds.push_back({g, {g.members}});
    else
      same->second.push_back(g.members);
  }
  std::string text;
  for (const auto& [g, groups] : kinds)
    text += row(
        text.empty() ? "nodes" : "",
        fmt::format("{:<4} {:<13}  each of {}: forward {}, backward {} (ring, a group)", g.label,
                    crosses_nodes(g.members, ranks_of_a_node) ? "crosses nodes" : "within a node",
                    groups_text(groups), moved_text(g.forward), moved_text(g.backward)));
  return text.empty() ? row("nodes", "no call is due, so nothing crosses") : text;
}

// Legal, and wasteful on a device: matrix units take tiles of 64 and more.
std::string small_text(const Contract& contract, const Case& line) {
  if (!contract.gemms) return "";
  constexpr int64_t tile = 64;
  int all = 0, small = 0;
  Gemm least;
  for (int rank = 0; rank < line.world(); ++rank)
    for (const Gemm& g : contract.gemms(line, rank)) {
      ++all;
      if (std::min(g.n, g.k) >= tile) continue;
      if (small++ == 0 || std::min(g.n, g.k) < std::min(least.n, least.k)) least = g;
    }
  if (small == 0) return "";
  return row("small", fmt::format("N or K is under {} in {} of {} local multiplies of all ranks; "
                                  "the smallest: {} with N={} K={}",
                                  tile, small, all, least.what, least.n, least.k));
}

std::string traffic_text(const Contract& contract, const Case& line, const Declared& declared,
                         bool backward) {
  std::string text;
  const Mesh mesh = line.mesh();
  auto kinds = folded(mesh.world(), [&](int rank) {
    return calls_of_rank(traffic_due(contract, declared, line, rank), backward, mesh, rank);
  });
  for (const auto& [calls, ranks] : kinds) {
    if (kinds.size() > 1) text += row("", "on " + braces(ranks));
    text += calls;
  }
  return text;
}

// "forward" set into the first row's empty title.
std::string titled(const std::string& title, std::string rows) {
  rows.replace(0, title.size(), title);
  return rows;
}

// ---- Who works on what, and when

// As many ticks side by side as a line has room for.
std::string ticks_text(const Schedule& t, size_t first, size_t end, size_t width) {
  const auto cells = [&](std::string title, const auto& cell) {
    std::string text = fmt::format("{:<7}", title);
    for (size_t tick = first; tick < end; ++tick) text += fmt::format(" {:<{}}", cell(tick), width);
    text.erase(text.find_last_not_of(' ') + 1);
    return row("", text);
  };
  std::string text = cells("tick", [](size_t tick) { return std::to_string(tick); });
  for (size_t place = 0; place < t.work.size(); ++place)
    text += cells(fmt::format("{}={}", name(t.axis), place), [&](size_t tick) {
      const std::string& work = t.work[place][tick];
      return work.empty() ? std::string("-") : work;
    });
  return text;
}

std::string timetable_text(const Contract& contract, const Case& line) {
  if (!contract.timetable) return "";
  constexpr size_t most_cells = 4096, columns = 88;
  const Schedule t = contract.timetable(line);
  const size_t ticks = t.work.empty() ? 0 : t.work[0].size();
  size_t width = std::to_string(ticks).size(), idle = 0;
  for (const auto& place : t.work)
    for (const std::string& work : place) {
      width = std::max(width, work.size());
      idle += work.empty();
    }
  std::string text =
      row("timetable", t.legend) +
      row("", fmt::format("{}, {} of {} places in them idle (-)", number_of(int64_t(ticks), "tick"),
                          idle, ticks * t.work.size()));
  if (ticks * t.work.size() > most_cells)
    return text + row("", fmt::format("more than {} places: a line with fewer microbatches or "
                                      "stages shows them",
                                      most_cells));
  const size_t side_by_side = std::max<size_t>(1, columns / (width + 1));
  for (size_t first = 0; first < ticks; first += side_by_side)
    text += ticks_text(t, first, std::min(ticks, first + side_by_side), width);
  return text;
}

// A copy of type I whose results are not all whole on the axis has met its rank's own share of
// them: its gradient is a part there until the layer has summed it.
bool summed_by_layer(const Operand& parameter, Axis axis, const std::vector<Operand>& operands) {
  if (placement_on(parameter.layout, axis).kind != Placement::invariant) return false;
  const Axis whole = axis == Axis::rep || axis == Axis::kv ? Axis::tp : axis;
  return std::any_of(operands.begin(), operands.end(), [&](const Operand& o) {
    if (o.role != Operand::output) return false;
    return std::none_of(o.layout.begin(), o.layout.end(), [&](const auto& on) {
      return (on.first == axis || on.first == whole) && on.second.kind == Placement::invariant;
    });
  });
}

// What each parameter's gradient still owes where it is handed over: to the training step after the
// backward, and to the optimizer before the step.
std::string owed_text(const std::vector<Operand>& operands, const Mesh& mesh, bool has_backward) {
  if (!has_backward)
    return row("owed",
               "nothing: there is no backward; gradients, where there are any, are results of the "
               "forward and whole where they are stored");
  std::string owed, made;
  bool parameters = false;
  for (const Operand& o : operands) {
    if (o.role != Operand::parameter || !o.gradient) continue;
    parameters = true;
    for (const auto& [a, placement] : o.layout) {
      if (mesh.size(a) == 1) continue;
      const std::string sum = fmt::format("{}: the sum of its gradient over {} {}", o.name, name(a),
                                          groups_text(mesh.holders(o.layout, {a})));
      if (dual(placement).kind == Placement::partial)
        owed +=
            row("owed", sum + ", after backward, by the training step; before the step nothing");
      else if (summed_by_layer(o, a, operands))
        made +=
            row("summed", sum + ", by the layer in its backward; after backward nothing is owed");
    }
  }
  if (!parameters) return row("owed", "nothing: no parameter takes a gradient");
  if (owed.empty())
    owed = row("owed",
               "nothing: each parameter's gradient is whole where it is stored, after "
               "backward and before the step");
  return made + owed;
}

// What the subject draws: on which axes copies must agree and shards must differ, and by how many
// draws that is judged.
std::string draws_text(const Contract& contract, const Case& line) {
  std::string text;
  for (const Look& look : looks_at_draws(contract, line)) {
    std::vector<std::string> parts;
    for (Axis a : look.copies) parts.push_back(fmt::format("copies on {} agree", name(a)));
    for (Axis a : look.shards) parts.push_back(fmt::format("shards on {} differ", name(a)));
    std::string judged = look.not_judged;
    if (look.judges_shards())
      judged = fmt::format("{}, equal by chance with 2^-{:.0f}", number_of(look.times, "draw"),
                           look.bits);
    text += row(text.empty() ? "draws" : "",
                fmt::format("{}: {}{}", look.drawn.name, joined(parts, ", "),
                            judged.empty() ? "" : " (" + judged + ")"));
  }
  return text;
}

// How a check's limit comes about.
std::string tier_of(char letter, bool exact, const Declared& declared) {
  switch (letter) {
    case 'F':
    case 'G':
    case 'A':
      return exact
                 ? "tier E, exact: integers whose intermediates are all representable, bound 0"
                 : "tier D, deterministic: from unit roundoffs, lengths and the reference's gauges";
    case 'D':
      return "finite differences: from their own truncation and round-off";
    case 'N':
    case 'E':
      return declared.deterministic ? "bit for bit"
                                    : "within the bound (declared not deterministic)";
    case 'K':
      return declared.leak_bitwise ? "bit for bit" : "within the bound (declared so)";
    case 'R':
    case 'M':
    case 'U':
      return "bit for bit";
    default:
      return "exact: no tolerance";
  }
}

std::string checks_text(const Contract& contract, const Case& line, const Declared& declared,
                        const Registry& registry) {
  bool exact = contract.has_exact_data() && line.text("fill") == name(Fill::integers);
  const auto due = due_checks(contract, line, declared, {}),
             of_backward = checks_of_backward(line, registry, {});
  std::string text;
  for (const Check& c : all_checks()) {
    std::string told = tier_of(c.letter, exact, declared);
    if (!contains(due, c.name)) {
      std::string why = c.left_out ? c.left_out(contract, line, declared) : "";
      if (contains(of_backward, c.name))
        why = contract.backward ? "the subject declares to have no backward"
                                : "the contract has no backward: forward judges all results";
      if (why.empty()) continue;
      told = "not due: " + why;
    }
    text += row(text.empty() ? "checks" : "", fmt::format("{:<12} {}", c.name, told));
  }
  return text.empty() ? row("checks", "none is due") : text;
}

std::string values_text(const Contract& contract, const Case& line) {
  std::string text = fmt::format("fill={} seed={} dtype={}", line.text("fill"), line.text("seed"),
                                 line.text("dtype"));
  if (line.text("fill") == name(Fill::integers) && contract.integer_range)
    if (auto range = contract.integer_range(line))
      text += fmt::format(", integers of [-{0},{0}] without 0", *range);
  return row("values", text);
}

void check_nodes(int nodes, int world) {
  if (nodes > 0 && world % nodes != 0)
    throw BadInput(
        fmt::format("key 'nodes': expected a divisor of the {} ranks, met {}", world, nodes));
}

void check_world_can_be_shown(const Case& line) {
  constexpr int most = 4096;
  if (line.world() > most)
    throw BadInput(fmt::format("the mesh keys: expected at most {} ranks in `explain`, met {}",
                               most, line.world()));
}

void check_taken(const Case& line, const Registry& registry) {
  const Contract& contract = registry.contract(line.contract);
  if (contract.precondition)
    if (auto refused = contract.precondition(line))
      throw BadInput(fmt::format("{}: expected {}, met {}; {}", line.contract, refused->expected,
                                 refused->met, refused->advice));
}

void check_exact(const Case& line, const Registry& registry) {
  const Contract& contract = registry.contract(line.contract);
  if (line.text("fill") == name(Fill::integers) && contract.integer_range &&
      !contract.integer_range(line)) {
    const std::string& dtype = line.text("dtype");
    const std::string use = shorter_sums(line, registry);
    if (const auto other = inexact(contract, line))
      throw BadInput(
          fmt::format("key 'fill': expected integers that stay exact in {} (fill=integers is the "
                      "default of {}), "
                      "met none with {}; use {}",
                      dtype, line.contract, other->has, use));
    throw BadInput(
        fmt::format("key 'fill': expected a size at which integers stay exact in {}, met {} "
                    "without such a range; use {}",
                    dtype, line.contract, use));
  }
}

// What a run refuses and a description does not need: data that stay exact, memory and time, and
// results that their types hold, which a small case has computed in no time.
std::string refused_by_run(const Contract& contract, const Case& line, const Declared& declared,
                           const Registry& registry) {
  constexpr double in_no_time = 1e7;  // multiplications
  try {
    check_exact(line, registry);
    refuse_too_big(line, due_checks(contract, line, declared, {}), registry);
    const Evidence base = plan_case(line, declared, {}, registry);
    if (cost_of(base).work <= in_no_time) refuse_overflow(base, registry);
    return "";
  } catch (const BadInput& e) {
    return row("run", "refuses it: " + telling::with_long_words_cut(e.what()));
  }
}

std::string line_text(const Case& line, int nodes) {
  return print(line) + (nodes > 0 ? fmt::format(" nodes={}", nodes) : "");
}

}  // namespace

void check_legal(const Case& line, const Registry& registry) {
  check_taken(line, registry);
  check_exact(line, registry);
}

const char* role_name(Operand::Role role) {
  switch (role) {
    case Operand::input:
      return "input";
    case Operand::parameter:
      return "parameter";
    case Operand::index:
      return "index";
    case Operand::output:
      return "output";
  }
  return "?";
}

// What follows is what is due, which a broken twin or a broken call does not keep.
std::string broken_text(const Case& line, const Registry& registry) {
  const std::string &control = line.text("control"), &fault = line.text("fault");
  if (control.empty() && fault.empty()) return "";
  const std::string imitates =
      control.empty() ? "" : registry.control(line.contract, control).imitates;
  return row("note", fmt::format("below is what the healthy kernel is due; what {}{} breaks of it "
                                 "is shown by `run`",
                                 control.empty() ? "fault=" + fault : "control=" + control,
                                 imitates.empty() ? "" : " (" + imitates + ")"));
}

std::string explain_text(const Case& line, int nodes, const Registry& registry) {
  check_world_can_be_shown(line);
  check_nodes(nodes, line.world());
  check_taken(line, registry);
  const Contract& contract = registry.contract(line.contract);
  const Declared declared = declared_of(line, registry);
  const Mesh mesh = line.mesh();
  const std::vector<Operand> operands = contract.operands(line);
  std::string text = row("line", line_text(line, nodes)) +
                     row("contract", contract.summary + of_one_call(contract)) +
                     broken_text(line, registry);
  text +=
      mesh_text(line, mesh, nodes) + operands_text(operands, mesh) + values_text(contract, line);
  for (bool backward : {false, true}) {
    if (backward && !declared.backward) break;
    text += titled(
        backward ? "backward" : "forward",
        gemms_text(contract, line, backward) + traffic_text(contract, line, declared, backward));
  }
  text += timetable_text(contract, line) + small_text(contract, line) +
          nodes_text(contract, line, declared, nodes);
  return text + owed_text(operands, mesh, bool(contract.backward)) + draws_text(contract, line) +
         checks_text(contract, line, declared, registry) +
         refused_by_run(contract, line, declared, registry);
}

}  // namespace shardproof
