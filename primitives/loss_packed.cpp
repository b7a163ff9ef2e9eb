#include "primitives/loss_packed.hpp"

#include "primitives/calls.hpp"
#include "primitives/token_loss.hpp"
#include "primitives/work.hpp"

namespace shardproof::primitives {
namespace {

struct LossSaved : Saved {
  View logits, ids;
  Kept next, weights, sums;
  double groups = 1;
};

Predictions predictions(const Case& line, const LossSaved& s) {
  return {tensor(s.logits), tensor(s.ids), tensor(s.next.view()), tensor(s.weights.view()),
          line.at("vocab")};
}

}  // namespace

std::optional<Rejected> refused_loss(const Case& line) {
  if (auto refused = refused_context(line)) return refused;
  if (line.ranks(Axis::tp) > 1)
    return Rejected("tp=1", "tp=" + line.text("tp"), "the classes are not cut here");
  return {};
}

Targets LossPacked::targets(const Case& line, const ContextLine& c, int r,
                            int64_t first_sequence) const {
  const auto by_row = c.documents.empty() ? labels_of_sequence(c.rows, 0) : labels_of_documents(c);
  const int64_t batch = c.batch, prompt = line.at("prompt");
  Targets t;
  for (int64_t row : owned_rows(c, c.rows, r))
    for (int64_t b = 0; b < batch; ++b) {
      const Label& own = by_row[size_t(row)];
      const bool last =
          row + 1 == c.rows || by_row[size_t(row + 1)].sequence != own.sequence || own.sequence < 0;
      const int64_t document = own.sequence + first_sequence + b;
      t.next.push_back(last ? -1 : (row + 1) * batch + b);
      t.weights.push_back(own.position < prompt * (1 + document % 3) ? 0 : 1);
    }
  return t;
}

double LossPacked::normalise(Rank& rank, const View& own, const View& sums,
                             const View& loss) const {
  const auto mean = [&](const View& to) { perform(LossMean{tensor(sums), tensor(to)}, "a mean"); };
  if (rank.line().text("normalise") == "tokens") {
    all_reduce(rank, rank.along(std::vector<Axis>{Axis::cp, Axis::dp}), own, sums);
    mean(loss);
    return 1;
  }
  all_reduce(rank, rank.along(Axis::cp), own, sums);
  Communicator& groups = rank.along(Axis::dp);
  const View of_group = rank.workspace(own.dtype, {1}), all = rank.workspace(own.dtype, {1});
  mean(of_group);
  all_reduce(rank, groups, of_group, all);
  scale(all, loss, 1, groups.size());
  return groups.size();
}

// inputs logits, ids, [cu_seqlens]; output loss.
std::unique_ptr<Saved> LossPacked::forward(Rank& rank, std::span<const View> inputs,
                                           std::span<const View> outputs) {
  const Case& line = rank.line();
  const ContextLine c = context_of(line, inputs.subspan(2));
  if (auto refused = refused_loss(line)) throw *refused;
  auto saved = std::make_unique<LossSaved>();
  saved->logits = inputs[0], saved->ids = inputs[1];
  const Targets own =
      targets(line, c, rank.coordinate(Axis::cp), c.batch * rank.coordinate(Axis::dp));
  saved->next = uploaded(own.next);
  saved->weights = uploaded(own.weights);
  saved->sums = Kept(accumulation_of(line), {2});
  const View losses = rank.workspace(accumulation_of(line), {int64_t(own.next.size())}),
             sums = rank.workspace(accumulation_of(line), {2});
  perform(TokenLoss{predictions(line, *saved), tensor(losses), !in_single(line)}, "a loss");
  perform(LossSums{tensor(losses), tensor(saved->next.view()), tensor(saved->weights.view()),
                   tensor(sums), !in_single(line)},
          "sums of losses");
  saved->groups = normalise(rank, sums, saved->sums.view(), outputs[0]);
  return saved;
}

void LossPacked::backward(Rank& rank, Saved& state, std::span<const View> cotangents,
                          std::span<const View> gradients) {
  const auto& saved = static_cast<const LossSaved&>(state);
  const Case& line = rank.line();
  perform(LossGradient{predictions(line, saved), tensor(cotangents[0]), tensor(saved.sums.view()),
                       tensor(gradients[0]), saved.groups, !in_single(line)},
          "the gradient of a loss");
}

}  // namespace shardproof::primitives
