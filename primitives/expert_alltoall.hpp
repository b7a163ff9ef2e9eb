// A layer of experts that are cut over ranks: rows go to the experts that they have chosen and come
// back by all-to-alls.
//
//   x [T,h], chosen and probs [T,k] of the own tokens; w [E/p,o,h]; y_t = sum_j probs_tj W_e x_t
//
// p ranks of the expert group (ep, and tp where it has ranks) own experts rE/p .. (r+1)E/p - 1.
// With k T rows leaving, sorted by expert, and R arriving:
//
//   forward   counts by expert gathered; rows [kT,h] to the owners; Z = X_e W_e^T for each own
//             expert; rows of Z [R,o] back; y_t weighs and adds the k rows of its token
//   backward  rows probs dy [kT,o] to the owners; dW_e = G_e^T X_e, D = G_e W_e; rows of D [R,h]
//             back; dx_t adds the k rows of its token, dprobs = <dy, z>
//
// capacity=0: blocks are uneven, no row is dropped and none is padded. capacity=C: an expert takes
// the first C rows of each rank, all first choices before all second ones, and zeros where these
// are fewer; the blocks are equal, nobody counts, and a choice beyond C adds nothing and has
// gradient 0.
//
// sp=off, tp > 1: tokens are the same on the ranks of tp, of which each dispatches its share; y and
// the gradients of x and probs are gathered over tp. Experts are copied over cp and dp: dW is
// summed there in one all-reduce. Ranks and experts without a row take part in every call, and
// their gradients are zero. What travels has the storage type, the all-reduce the wire type.
#pragma once
#include <memory>
#include <vector>

#include "primitives/expert_line.hpp"
#include "primitives/replicated.hpp"

namespace shardproof::primitives {

struct ExpertPlace {
  int64_t member, own;  // of the expert group; number among that member's experts
};

// Who sends how many rows to whom, and in which order. Slot t k + j is choice j of own token t.
struct Dispatch {
  std::vector<int64_t> slots;           // of the rows that leave, by expert; -1: a row of zeros
  std::vector<int64_t> sent, received;  // rows for and from each member
  std::vector<int64_t> order;           // of arriving rows, by own expert and member
  std::vector<int64_t> rows_of;         // each own expert's
  int64_t arriving() const { return int64_t(order.size()); }
};

struct ExpertSaved : Saved {
  View probs, w;  // probs of the tokens that this rank dispatches
  Dispatch dispatch;
  // places: of each slot among the rows, -1 where it is dropped; back: inverse of order
  Kept slots, places, order, back;
  Kept rows, results;  // X by expert [R,h]; Z as it came back [kT,o]
};

class ExpertAlltoall : public Kernel {
 public:
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual ExpertPlace place_of(int64_t expert, int64_t experts, int64_t members) const;
  // Slots in the order in which an expert takes them, where it does not take all.
  virtual std::vector<int64_t> by_priority(int64_t slots, int64_t choices) const;
  virtual std::vector<int64_t> rows_within_capacity(Rank&, const ExpertLine&,
                                                    const std::vector<int64_t>& by_slot,
                                                    Dispatch&) const;
  // counts [p,E]: rows that each member sends to each expert, experts by member and own number.
  virtual std::vector<int64_t> all_counts(Rank&, Communicator&,
                                          const std::vector<int64_t>& mine) const;
  virtual void take_rows(const View& from, const View& index, const View& to) const;
  virtual std::vector<int64_t> order_of(const std::vector<int64_t>& counts, int64_t experts,
                                        int64_t me) const;
  virtual bool cuts_tokens(const ExpertLine&) const;      // that all ranks of tp hold
  virtual int share_of(Parallel&) const;                  // which of tp shares this rank dispatches
  virtual View weights(Rank&, const ExpertSaved&) const;  // of the slots
  virtual View places_of(const ExpertSaved&) const;
  virtual void prob_gradient(Rank&, const ExpertSaved&, const View& g, const View& to) const;
  virtual void idle_expert(const View& gradient) const;
  virtual const View& way_back(const ExpertSaved&, bool backward) const;
  virtual bool takes_part(const ExpertSaved&) const;  // in the last call of a backward
  virtual std::vector<Axis> summed_over(const Case&) const;
  virtual void sum_gradients(Parallel&, const Parts&, const std::vector<Axis>&);

 private:
  void plan(Rank&, const ExpertLine&, const View& chosen, ExpertSaved&) const;
  // The rows of a rank, by expert; and the counts of all members.
  std::vector<int64_t> all_rows(Rank&, const ExpertLine&, const std::vector<int64_t>& by_slot,
                                Dispatch&) const;
  View own_tokens(Parallel&, const ExpertLine&, const View& all) const;
  View own_result(Parallel&, const ExpertLine&, const View& all) const;
  void gather_tokens(Parallel&, const ExpertLine&, const View& own, const View& all) const;
  View to_experts(Rank&, Communicator&, const ExpertSaved&, const View& rows) const;
  void from_experts(Rank&, Communicator&, const ExpertSaved&, const View& by_expert, const View& to,
                    bool backward) const;
};

}  // namespace shardproof::primitives
