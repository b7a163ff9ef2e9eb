#include "reference/muon.hpp"

#include <Eigen/Eigenvalues>
#include <algorithm>
#include <cmath>
#include <limits>

#include "reference/replicated.hpp"

namespace shardproof::reference {
namespace {

using Matrix = Eigen::Matrix<double, Eigen::Dynamic, Eigen::Dynamic, Eigen::RowMajor>;

// An iterate, and the Frobenius norm of what a computed one may be off by.
struct Iterate {
  Matrix x;
  double off = 0;
};

// Where the singular values of a matrix with this Gram matrix lie, and what double loses of them.
struct Range {
  double least = 0, greatest = 0;
};
Range singular_values(const Matrix& gram) {
  // In two steps: in one, Eigen's templates for eigenvectors, which nobody asks for, are compiled.
  const Eigen::Tridiagonalization<Eigen::MatrixXd> steps(gram);
  Eigen::SelfAdjointEigenSolver<Eigen::MatrixXd> solver;
  solver.computeFromTridiagonal(steps.diagonal(), steps.subDiagonal(), Eigen::EigenvaluesOnly);
  const double greatest = std::max(0.0, solver.eigenvalues().maxCoeff()), lost = 0x1p-40 * greatest;
  return {std::sqrt(std::max(0.0, solver.eigenvalues().minCoeff() - lost)),
          std::sqrt(greatest + lost)};
}

// What one iteration makes of the roundings of an iterate that is off.
struct Made {
  const Quintic& p;
  double terms, ranks, u;
  double gamma(double n) const { return gamma_of(n, u); }

  // r and size bound the spectral and the Frobenius norm of the computed iterate, the others the
  // Frobenius norms of A, A^2 and B = b A + c A^2 of it.
  double error(double r, double size, double gram, double square, double factor) const {
    const double b = std::abs(p.b), c = std::abs(p.c);
    const double e_gram = gamma(terms + ranks) * size * size, computed = gram + e_gram;
    const double e_square = e_gram * (2 * r * r + e_gram) + gamma(terms) * computed * computed;
    const double e_factor =
        b * e_gram + c * e_square + gamma(4) * (b * computed + c * (square + e_square));
    return e_factor * r + gamma(terms + 2) * (factor + e_factor) * size +
           gamma(3) * std::abs(p.a) * size;
  }
};

Iterate iterated(const Iterate& at, const Quintic& p, double terms, double ranks, double u) {
  const Matrix& x = at.x;
  const bool tall = x.rows() > x.cols();
  const Matrix gram = tall ? Matrix(x.transpose() * x) : Matrix(x * x.transpose());
  const Matrix square = gram * gram, factor = p.b * gram + p.c * square;
  const Range s = singular_values(gram);
  const double e = at.off, r = s.greatest + e;
  // What X X^T and its square are off by where X is.
  const double gram_off = e * (s.greatest + r),
               square_off = gram_off * (s.greatest * s.greatest + r * r);
  const Made made{p, terms, ranks, u};
  Iterate next;
  next.x = p.a * x + (tall ? Matrix(x * factor) : Matrix(factor * x));
  next.off = p.steepest(std::max(0.0, s.least - e), r) * e +
             made.error(r, x.norm() + e, gram.norm() + gram_off, square.norm() + square_off,
                        factor.norm() + std::abs(p.b) * gram_off + std::abs(p.c) * square_off);
  return next;
}

// u / max(norm, eps): norm is off by its own error, and eps, where it is surely the greater one, by
// a rounding.
Iterate normalised(const MatrixExtents& m, const Uncertain& u, double eps, double ranks,
                   double roundoff) {
  const Uncertain norm = norm_of(u, m.rows * m.columns + int64_t(ranks), roundoff);
  const double eps_off = roundoff * eps, off = global_norm({u.error}),
               by = std::max(norm.value[0], eps);
  const bool below = norm.value[0] + norm.error[0] < eps - eps_off;
  const double by_off = below ? eps_off : std::max(norm.error[0], eps_off);
  Iterate start{Eigen::Map<const Matrix>(u.value.data(), m.rows, m.columns) / by, 0};
  const double size = start.x.norm();
  if (by_off >= by)
    start.off = std::numeric_limits<double>::infinity();
  else
    start.off = (off + size * by_off) / (by - by_off);
  start.off += gamma_of(3, roundoff) * (size + start.off);
  return start;
}

Off at(const Uncertain& u, size_t i) { return {u.value[i], u.error[i]}; }
void put(Uncertain& u, const Off& x) { u.value.push_back(x.value), u.error.push_back(x.error); }

}  // namespace

double Quintic::at(double s) const { return s * (a + s * s * (b + s * s * c)); }

// Where p(s) / s is stationary it is p'(s): that has its greatest values at the ends, or where p''
// is 0.
double Quintic::steepest(double l, double r) const {
  double greatest = 0;
  for (double y : {l * l, r * r, -3 * b / (10 * c)})  // squares of s
    if (y >= l * l && y <= r * r)
      greatest = std::max(
          {greatest, std::abs(a + y * (3 * b + 5 * c * y)), std::abs(a + y * (b + c * y))});
  return greatest;
}

double muon_scale(const MatrixExtents& m, bool match_rms) {
  const double rows = double(m.rows), columns = double(m.columns);
  return match_rms ? 0.2 * std::sqrt(std::max(rows, columns))
                   : std::sqrt(std::max(1.0, rows / columns));
}

Uncertain orthogonalised(const MatrixExtents& m, const Uncertain& u, const MuonRule& rule,
                         double ranks, double roundoff) {
  Iterate o = normalised(m, u, rule.eps, ranks, roundoff);
  for (int64_t i = 0; i < rule.iterations; ++i)
    o = iterated(o, rule.quintic, double(std::max(m.rows, m.columns)), ranks, roundoff);
  const double typical = o.x.norm() / std::sqrt(double(o.x.size()));
  const bool says = o.off == 0 || o.off < typical;
  return {Values(o.x.data(), o.x.data() + o.x.size()),
          Values(u.size(), says ? o.off : std::numeric_limits<double>::infinity())};
}

MuonStep muon_step(const MuonRule& rule, const MatrixExtents& extents, In x, In m,
                   const Uncertain& g, double ranks, double roundoff) {
  const double mu = rule.momentum, weight = rule.average ? 1 - mu : 1;
  MuonStep s;
  Uncertain u;
  for (size_t i = 0; i < g.size(); ++i) {
    const Off next = mixed(mu, {m[i], 0}, weight, at(g, i), roundoff);
    put(s.m, next);
    put(u, rule.nesterov ? mixed(mu, next, weight, at(g, i), roundoff) : next);
  }
  const Uncertain o = orthogonalised(extents, u, rule, ranks, roundoff);
  const double by = rule.lr * muon_scale(extents, rule.match_rms);
  for (size_t i = 0; i < g.size(); ++i)
    put(s.x, moved(x[i], rule.lr * rule.decay, by, at(o, i), roundoff));
  return s;
}

}  // namespace shardproof::reference
