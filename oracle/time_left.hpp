// How long a gate still takes, from what it has been through so far.
#pragma once
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>

namespace shardproof {

// What takes time alike: the cases, named controls or tried witnesses of a contract, side by side
// with others or alone (MPI ranks). A witness has all of its calls broken in turn; a sampled one
// only those that are like none before, which takes about what a case takes.
struct Pace {
  enum What : uint8_t { a_case, a_control, a_witness, a_sampled_witness } what = a_case;
  std::string contract;
  bool alone = false;
};

// Contracts differ by two orders of magnitude and what is cheap comes last, so that each is taken
// at its own mean: where there is none yet, at that of its like on all contracts.
class TimeLeft {
 public:
  void due(const Pace&, int64_t count, double weight = 1);
  void done(const Pace& pace, double seconds);
  // Unknown before some of each kind is over and a ninth of all has passed. `elapsed`: until now.
  std::optional<double> seconds(double elapsed) const;

 private:
  struct Spent {
    int64_t due = 0, done = 0;
    double seconds = 0, weight = 1;
    int64_t left() const { return due > done ? due - done : 0; }
  };
  using Key = std::tuple<Pace::What, bool, std::string>;
  static Key key(const Pace& p) { return {p.what, p.alone, p.contract}; }
  double of_likes(Pace::What, std::optional<bool> alone) const;
  std::optional<double> mean(const Key&, const Spent&) const;
  std::map<Key, Spent> of_;
};

}  // namespace shardproof
