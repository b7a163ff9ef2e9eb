// A case that a foreign program runs: what every rank is fed and has to give back, by name.
//
// The shots of the checks become passes of the foreign program, each a list of steps:
//   forward   takes  PREFIXx, PREFIXw ...          gives  PREFIXy ...
//   backward  takes  PREFIXgrad.y ...              gives  PREFIXgrad.x, PREFIXgrad.w ...
// The first pass has no prefix; further ones have "shot3/", or "shot3.0/", "shot3.1/" where several
// forwards are in flight.
#pragma once
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "oracle/check.hpp"
#include "oracle/registry.hpp"

namespace shardproof::prepared {

struct Named {
  std::string name;       // with its prefix: "shot3/grad.x"
  int operand = 0;        // index into the contract's operands
  bool gradient = false;  // a cotangent among what is taken, a gradient among what is given
};

struct Step {
  bool backward = false;
  int feed = 0;
  std::string prefix;
  std::vector<Named> takes, gives;
  std::vector<std::pair<std::string, std::string>> keys;  // of the line, that it reads otherwise
};

struct Pass {
  std::string name;  // of the shot
  bool accumulate = false;
  std::vector<Step> steps;
};

// A check that is due on the line and cannot be asked of files, or was not asked for.
struct Unasked {
  std::string check, why;
};

struct Plan {
  std::unique_ptr<const Case> line;
  std::vector<std::string> only;    // checks asked for; empty: all
  std::vector<std::string> checks;  // that are asked, in report order
  std::vector<Unasked> unasked;
  Evidence evidence;  // its shots are the passes
  std::vector<Pass> passes;

  DType dtype_of(const Named&) const;
  Layout layout_of(const Named&) const;
  std::vector<int64_t> local_shape_of(const Named&, int rank) const;
};

// `only` without gradient, adjoint and accumulate: no backward is asked for. Throws BadInput where
// the line names what a foreign program takes the place of, or nothing that is asked can be judged.
// `given_in_files`: values that feeds give and that are worked out from others are left out.
Plan plan_of(const Case&, const std::vector<std::string>& only, const Registry&,
             bool given_in_files = false);

// Local elements that a rank is fed for a tensor that a step takes, row-major.
std::vector<std::byte> fed(const Plan&, const Pass&, const Step&, const Named&, int rank);

std::string in_file(int rank);   // "rank0.in.safetensors"
std::string out_file(int rank);  // "rank0.out.safetensors"

}  // namespace shardproof::prepared
