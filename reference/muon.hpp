// A step of Muon on one matrix, in double, and how far an implementation may be from it.
//
//   m' = mu m + w g                      w = 1, or 1 - mu where the momentum is an average
//   u  = w g + mu m' (nesterov), or m'
//   X0 = u / max(||u||_F, eps)
//   X' = a X + (b A + c A^2) X, A = X X^T, so many times: O       (Newton-Schulz, quintic)
//   x' = x (1 - lr decay) - lr scale O
//
// (K. Jordan et al., Muon, 2024; torch.optim.Muon; Moonshot's scale of matched RMS, 2025.) With
// X = U S V^T one iteration is U p(S) V^T, p(s) = a s + b s^3 + c s^5: A on either side gives the
// same, and O depends on the whole of u.
//
// Bound. A running error over |A| |X| grows by |a| + 3 |b| + 5 |c| = 28 an iteration, 1.7e7 times
// in five. p acts on singular values alone, so that errors are carried in the Frobenius norm:
//
//   carried   The derivative of X -> p(X) in a direction E multiplies the entries of E in singular
//             bases of X, their symmetric and antisymmetric parts and those outside of the range
//             apart, by divided differences of p between s_i and s_j, s_i and -s_j, s_i and 0
//             (Daleckii and Krein). Where all s are in [l, r] the first is p' somewhere there, the
//             third p(s_i) / s_i, and the second, (p(s_i) + p(s_j)) / (s_i + s_j), a mean of two of
//             these. With M(l, r) the greatest of |p'(s)| and |p(s) / s| on [l, r], and since on
//             the way from X to X + E singular values stay within e = ||E||_F of those of X,
//               ||p(X + E) - p(X)||_F <= M(s_min - e, s_max + e) e
//             whatever the size of E. M is 3.4445 where there is a singular value of 0, 1.61
//             between 0.7 and 1.1, and 3.97 at most up to 1.2024, the greatest value of p on [0,
//             1]: five iterations carry an error of the start by 860 at most.
//   made      One iteration as computed from X^ = X + E, with r = ||X||_2 + ||E||_F,
//             S = ||X||_F + ||E||_F, sums of K terms, and of p parts where ranks add A up:
//               e_A = gamma_(K+p) S^2
//               e_2 = e_A (2 r^2 + e_A) + gamma_K (||A|| + e_A)^2
//               e_B = |b| e_A + |c| e_2 + gamma_4 (|b| (||A|| + e_A) + |c| (||A^2|| + e_2))
//               e   = e_B r + gamma_(K+2) (||B|| + e_B) S + gamma_3 |a| S
//             as || |Y| |Z| ||_F <= ||Y||_F ||Z||_F. K is the longer extent, so that it holds for A
//             on either side.
//   start     ||u^ - u||_F = d moves the norm by d at most: X0 is off by
//             (d + ||X0|| (d + rounding)) / (norm - d - rounding).
//
// An element is off by the norm at most. A bound of the size of a typical element of O would let a
// step in any direction pass: from there on it is infinite, which no check takes for a proof.
#pragma once
#include "reference/optimizer.hpp"

namespace shardproof::reference {

// p of the iteration.
struct Quintic {
  double a = 3.4445, b = -4.7750, c = 2.0315;
  double at(double s) const;
  double steepest(double l, double r) const;  // greatest |p'(s)| and |p(s) / s| on [l, r]
};

struct MatrixExtents {
  int64_t rows = 0, columns = 0;
};

struct MuonRule {
  double momentum = 0, lr = 0, decay = 0, eps = 0;
  bool nesterov = true, average = false, match_rms = false;
  int64_t iterations = 5;
  Quintic quintic = {};
};

// sqrt(max(1, rows / columns)), or 0.2 sqrt(max(rows, columns)) where RMS is matched with AdamW's.
double muon_scale(const MatrixExtents&, bool match_rms);

// O of u, whose squares and products `ranks` ranks add up.
Uncertain orthogonalised(const MatrixExtents&, const Uncertain& u, const MuonRule&, double ranks,
                         double roundoff);

struct MuonStep {
  Uncertain x, m;
};
// x and m are exact, g is off by its error.
MuonStep muon_step(const MuonRule&, const MatrixExtents&, In x, In m, const Uncertain& g,
                   double ranks, double roundoff);

}  // namespace shardproof::reference
