// Losses of language models on whole tensors, in double.
//
//   per token  m = max_j z_j, E = sum_j exp(z_j - m), nll = m + log E - z_y
//              loss = (1-s) nll + s (m + log E - mean_j z_j)         s: smoothing
//              dz_j = g (exp(z_j - m)/E - (1-s) [j = y] - s/V)
//   a label of -100 is ignored: loss 0, gradient 0
//
//   log-softmax  y_j = (z_j - m) - log E            dz_j = g_j - exp(z_j - m)/E sum_k g_k
//
//   log-probs    x = z / T: the log-probability of a label, x_y - m - log E, and the entropy of its
//                token, H = log E - mean of x - m under p, p_j = exp(x_j - m)/E
//                dz_j = (a ([j = y] - p_j) - b p_j (log p_j + H)) / T        a, b: their cotangents
//                a label of -100 is ignored: log-probability 0, and a with it
//
//   packed     tokens predict their successor in the same document; w are weights (masks)
//              N1 = sum w loss / max(1, sum w) over everything
//              N2 = mean over groups of [sum w loss / max(1, sum w)] (groups: microbatches,
//              replicas)
#pragma once
#include <cstdint>
#include <span>

#include "reference/linear.hpp"

namespace shardproof::reference {

inline constexpr int64_t ignored_label = -100;

Values cross_entropy(In logits, std::span<const int64_t> labels, int64_t classes, double smoothing);
// g [T] is the cotangent of the losses.
Values cross_entropy_backward(In logits, std::span<const int64_t> labels, int64_t classes,
                              double smoothing, In g);

// Bounds on what an implementation in unit roundoff u may err by before it stores: of the losses,
// and of the gradients of their sum.
struct CrossEntropyErrors {
  Values loss, logits;
};
CrossEntropyErrors cross_entropy_errors(In logits, std::span<const int64_t> labels, int64_t classes,
                                        double u);
// The same of log E - (z_y - m) and exp(z - m) / E, in which m is never added again: large logits
// that lie close together cost nothing. tiny: what an exp may lose below the normal range.
CrossEntropyErrors shifted_cross_entropy_errors(In logits, std::span<const int64_t> labels,
                                                int64_t classes, double smoothing, double u,
                                                double tiny);

// Rows of `classes` logits; g [T, classes].
Values log_softmax(In logits, int64_t classes);
Values log_softmax_backward(In logits, int64_t classes, In g);
// Bounds on what an implementation in unit roundoff u may err by before it stores, whose backward
// takes exp of y or exp(z - m) / E; y is kept in u_y.
struct LogSoftmaxErrors {
  Values y, logits;
};
LogSoftmaxErrors log_softmax_errors(In logits, int64_t classes, In g, double u, double u_y,
                                    double tiny);

// Of softmax(logits / temperature), one of each a token; the entropy in nats. A logit of -inf has
// the probability 0 and no part in the entropy; no label names its class.
struct LogProbs {
  Values log_probs, entropy;
};
LogProbs log_probs(In logits, std::span<const int64_t> labels, int64_t classes, double temperature);
Values log_probs_backward(In logits, std::span<const int64_t> labels, int64_t classes,
                          double temperature, In of_log_probs, In of_entropy);
// Bounds on what an implementation in unit roundoff u may err by before it stores, whichever of the
// usual forms of the entropy it takes: log E - sum p (x - m), m + log E - sum p x, -sum p log p.
// `logits` are of the gradients, where cotangents are given.
struct LogProbErrors {
  Values log_probs, entropy, logits;
};
LogProbErrors log_probs_errors(In logits, std::span<const int64_t> labels, int64_t classes,
                               double temperature, In of_log_probs, In of_entropy, double u,
                               double tiny);

enum class Normalisation : uint8_t { tokens, groups };  // N1, N2
// Factor of each token's loss in the scalar: w_t / max(1, sum w), over all tokens (N1) or over the
// token's group, and then over the number of groups (N2). Tokens without a label count for nothing.
Values loss_factors(Normalisation, std::span<const int64_t> labels, In weights,
                    std::span<const int64_t> group_of_token, int64_t groups);

}  // namespace shardproof::reference
