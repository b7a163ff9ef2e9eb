// A layer of experts that are cut over ranks: rows go to the experts that they have chosen and come
// back by all-to-alls. What an expert computes of a row is its layer's (expert_alltoall: a linear;
// expert_mlp: a feed-forward block that tp cuts).
//
//   x [T,h], chosen and probs [T,k] of the own tokens; y_t = sum_j probs_tj f_e(x_t)
//
// p ranks of the expert group own experts rE/p .. (r+1)E/p - 1. With k T rows leaving, sorted by
// expert, and R arriving:
//
//   forward   counts by expert gathered; rows [kT,h] to the owners; Z = f_e(X_e), expert by expert;
//             rows of Z [R,o] back; y_t weighs and adds the k rows of its token
//   backward  rows probs dy [kT,o] to the owners; parameter gradients and D, the gradient of X_e;
//             rows of D [R,h] back; dx_t adds the k rows of its token, dprobs = <dy, z>
//
// capacity=0: blocks are uneven, no row is dropped and none is padded. capacity=C: an expert takes
// the first C rows of each rank, all first choices before all second ones, and zeros where these
// are fewer; the blocks are equal, nobody counts, and a choice beyond C adds nothing and has
// gradient 0.
//
// Experts are copied over cp and dp: parameter gradients are summed there in one all-reduce. Ranks
// and experts without a row take part in every call, and their gradients are zero. What travels has
// the storage type, sums the wire type.
#pragma once
#include <memory>
#include <vector>

#include "primitives/expert_line.hpp"
#include "primitives/replicated.hpp"

namespace shardproof::primitives {

struct ExpertPlace {
  int64_t member, own;  // of the expert group; number among that member's experts
};

// Rows that each sender has for each expert, experts by member and own number. Senders are the
// members of the expert group and, where rows of tp are gathered, each member's shares: [p,s,E].
struct SentRows {
  int64_t members, shares, experts;
  std::vector<int64_t> counts;

  int64_t own() const { return experts / members; }
  // From one sender for n experts in a row.
  int64_t of(int64_t member, int64_t share, int64_t first, int64_t n) const;
  int64_t to(int64_t receiver, int64_t member, int64_t share) const {
    return of(member, share, receiver * own(), own());
  }
  int64_t arriving(int64_t receiver, int64_t share) const;  // from all members
  int64_t rows_of(int64_t expert) const;                    // from all senders
  // Rows of each share where these are gathered: as many as the share with most has.
  int64_t block(int64_t receiver) const;
};

// Who sends how many rows to whom, and in which order. Slot t k + j is choice j of own token t.
struct Dispatch {
  std::vector<int64_t> slots;           // of the rows that leave, by expert; -1: a row of zeros
  std::vector<int64_t> sent, received;  // rows for and from each member
  int64_t block = 0, shares = 1;        // what arrives is filled up to block rows and gathered
  std::vector<int64_t> order;           // of rows as they lie then, by own expert, share and member
  std::vector<int64_t> rows_of;         // each own expert's
  int64_t arriving() const;
  int64_t rows() const { return int64_t(order.size()); }  // that the own experts compute
};

struct ExpertSaved : Saved {
  View probs;           // of the tokens that this rank dispatches
  std::vector<View> w;  // parameters
  Dispatch dispatch;
  // places: of each slot among the rows, -1 where it is dropped; back: inverse of order
  Kept slots, places, order, back;
  Kept rows, results;  // X by expert [R,h]; Z as it came back [kT,o]
};

class ExpertLayer : public Kernel {
 public:
  // inputs x, chosen, probs, parameters; output y
  std::unique_ptr<Saved> forward(Rank&, std::span<const View> inputs,
                                 std::span<const View> outputs) override;
  void backward(Rank&, Saved&, std::span<const View> cotangents,
                std::span<const View> gradients) override;

 protected:
  virtual std::unique_ptr<ExpertSaved> saved() const { return std::make_unique<ExpertSaved>(); }
  // z = f_e of saved.rows; the type in which its rows are handed on.
  virtual void run_experts(Parallel&, ExpertSaved&, const View& z) = 0;
  virtual DType result_type(Parallel&) const = 0;
  // dx and parameter gradients from g, the cotangents of z.
  virtual void run_backward(Parallel&, const ExpertSaved&, const View& g, const View& dx,
                            std::span<const View> dw) = 0;
  // What the own experts compute with of what has arrived, and what goes back of what they give.
  virtual View gathered(Parallel&, const ExpertSaved&, const View& arrived) const;
  virtual View reduced(Parallel&, const ExpertSaved&, const View& results, Phase) const;

  virtual ExpertPlace place_of(int64_t expert, int64_t experts, int64_t members) const;
  // Slots in the order in which an expert takes them, where it does not take all.
  virtual std::vector<int64_t> by_priority(int64_t slots, int64_t choices) const;
  virtual std::vector<int64_t> rows_within_capacity(Rank&, const ExpertLine&,
                                                    const std::vector<int64_t>& by_slot,
                                                    Dispatch&) const;
  virtual std::vector<int64_t> all_counts(Rank&, Communicator&,
                                          const std::vector<int64_t>& mine) const;
  virtual void take_rows(const View& from, const View& index, const View& to) const;
  virtual std::vector<int64_t> order_of(const SentRows&, int64_t me) const;
  virtual bool gathers(const ExpertLine&) const;      // over tp, what has arrived
  virtual bool cuts_tokens(const ExpertLine&) const;  // that all ranks of tp hold
  virtual int share_of(Parallel&) const;              // which of tp shares this rank dispatches
  // Rows of the own tokens, by the list of the rows that leave.
  virtual void rows_of_tokens(Rank&, const ExpertSaved&, const View& x, const View& tokens,
                              const View& to) const;
  virtual View weights(Rank&, const ExpertSaved&) const;  // of the slots
  virtual View places_of(const ExpertSaved&) const;
  virtual void prob_gradient(Rank&, const ExpertSaved&, const View& g, const View& to) const;
  virtual void idle_expert(const View& gradient) const;
  virtual const View& way_back(const ExpertSaved&, Phase) const;
  virtual bool takes_part(const ExpertSaved&) const;  // in the last call of a backward
  virtual void from_experts(Parallel&, Communicator&, const ExpertSaved&, const View& by_expert,
                            const View& to, Phase) const;
  virtual std::vector<Axis> summed_over(const Case&) const;
  virtual void sum_gradients(Parallel&, const Parts&, const std::vector<Axis>&);

 private:
  std::vector<int64_t> experts_of(const ExpertLine&, int64_t members, const View& chosen) const;
  void plan(Parallel&, const ExpertLine&, const View& chosen, ExpertSaved&) const;
  // The rows of a rank, by expert; and the counts of all senders.
  std::vector<int64_t> all_rows(Rank&, const ExpertLine&, const std::vector<int64_t>& by_slot,
                                Dispatch&) const;
  Communicator& senders(Rank&, const ExpertLine&) const;
  View own_tokens(Parallel&, const ExpertLine&, const View& all) const;
  View own_result(Parallel&, const ExpertLine&, const View& all) const;
  void gather_tokens(Parallel&, const ExpertLine&, const View& own, const View& all) const;
  View to_experts(Parallel&, Communicator&, const ExpertSaved&, const View& rows) const;
};

// Calls each(own expert, its first row, its rows).
template <class Each>
void each_expert(const Dispatch& d, Each each) {
  int64_t first = 0;
  for (size_t e = 0; e < d.rows_of.size(); ++e) {
    each(int64_t(e), first, d.rows_of[e]);
    first += d.rows_of[e];
  }
}

View rows_like(Rank&, int64_t rows, const View& like);  // [rows, columns of like]

}  // namespace shardproof::primitives
