// What a subject draws by itself (dropout masks) on the ranks of a mesh: equal on copies, different
// on shards.
//
// Two healthy shards may be equal by chance. With b bits an element (Drawn::bits), n elements on
// the smaller of two shards and k independent draws of both, they are so with probability 2^-(b n
// k). As many draws are looked at as bring the chance that any pair of any value does so below
// 2^-60; where 16 do not, shards are not judged, and the note says what was missing.
#pragma once
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "oracle/checks/judging.hpp"

namespace shardproof {

inline constexpr double false_clash_bits = 60;  // 2^-60: any two shards of a line equal by chance
inline constexpr int most_draws = 16;

// One drawn value on a line.
struct Look {
  Drawn drawn;
  int operand = -1;                  // output that shows it
  std::vector<Axis> copies, shards;  // axes above 1 on which its ranks must agree, must differ
  int times = 1;                     // draws that are looked at
  double bits = 0;                   // that two shards share by chance with 2^-bits, in all draws
  std::string not_judged;            // why shards are not compared; "" where they are

  bool judges_shards() const { return !shards.empty() && not_judged.empty(); }
};
// Those with something to compare. Empty on one rank, and where nothing is drawn.
std::vector<Look> looks_at_draws(const Contract&, const Case&);
// "dropout1.mask: shards on tp must differ, not applicable: 16 draws ..." of the looks whose shards
// are not judged; "" where all are.
std::string draws_not_judged(std::span<const Look>);

// Key and value of the k-th draw after the line's own; empty where the contract has no such key.
std::vector<std::pair<std::string, std::string>> draw_keys(const Contract&, const Case&, int k);
// The value of all elements of an input in a look; null where the look leaves it as it is.
const double* given_value(const Look&, const std::string& input);
// The feed that shows the k-th draw, elsewhere like `base`.
Feed feed_of_draw(const Contract&, const Case&, const Look&, int k, Feed base);

namespace judging {
// The looks' draws, which are the outputs of steps first_step, first_step + 1, ... of a shot: the
// times of the first look, then those of the second.
Agreement same_draws(const Evidence&, std::span<const Look>, int shot, int first_step);
}  // namespace judging

}  // namespace shardproof
