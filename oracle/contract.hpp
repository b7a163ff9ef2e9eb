// The statement of a primitive: operands, preconditions, reference, traffic that is due.
#pragma once
#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "oracle/case.hpp"
#include "oracle/subject.hpp"

namespace shardproof {

struct Operand {
  std::string name;
  enum Role : uint8_t { input, parameter, index, output } role = input;
  std::vector<int64_t> shape;  // global
  Layout layout;
  bool gradient = true;  // false: frozen, index; of an output: its cotangent is zero
  int contraction = -1;  // dim of the WHOLE shape along which `cancelling` pairs; -1 last
  DType dtype_override = DType::f64;  // used where fixed_dtype
  bool fixed_dtype = false;           // e.g. i64 indices, f32 lse under bf16
  int64_t below = 0;                  // index: drawn from 0 .. below-1; 0: as the fill draws
  std::vector<double> stated = {};    // index: what the line says, nothing is drawn
  // index: the whole of it follows from the seed of a feed by a rule of the family (a routing)
  std::function<std::vector<double>(uint64_t seed)> made = nullptr;
  bool magnitude = false;  // drawn without its sign: a mean of squares
  // Parts of a tensor, or of its cotangent, that differ in size: what is drawn at an index of the
  // whole shape is multiplied by this, 0 or a power of two.
  std::function<double(int64_t index)> factor = nullptr;
  // What is drawn passes this, and is rounded again: a decay is no normal number. Of an integer
  // (fill=integers) it makes one.
  std::function<double(double drawn, bool integer)> through = nullptr;
  bool linear = true;  // false: results of a linear contract are not linear in it
};
// In which an operand, or its gradient, is stored: grad= says it of a parameter's gradient.
DType stored_type(const Case&, const Operand&, bool gradient = false);

// A whole tensor in double, row-major. Inputs are stacked over P and V axes (whole_shape); results
// are what they denote (denoted_shape).
struct Whole {
  std::vector<int64_t> shape;
  std::vector<double> value;
};

// For bounds, elementwise like the results, from the same pass of the reference.
//   magnitude  sum of |terms|; squares  sum of squared terms; terms  how many (contraction length)
struct Gauge {
  std::vector<double> magnitude, squares;
  int64_t terms = 1;        // local accumulation length (K/p)
  int64_t reduced = 1;      // ranks that a collective sums over
  bool independent = true;  // roundings; false: one rounded coefficient enters all elements
  // Where a family computes its own componentwise bound: in unit roundoffs of the accumulation
  // (Precision::u_acc), with the reference's own rounding in it.
  std::vector<double> bound;
  // Where a result is rounded to a coarse grid and its neighbour is as right, how far that is away:
  // allowed beside everything else, in no unit, and rounded when it is stored.
  std::vector<double> step;
  // Each rank adds up its own part of the microbatches of a step, in the type of the wire, before
  // the sums are reduced.
  bool deferred = false;
};
// What bounds are computed from, by the family's own formula where it has one.
struct Precision {
  double u_acc, u_wire, u_out;  // unit roundoffs of accumulation, wire and result type
  bool truncates = false;
  double u_factor = 0;  // of each factor before it is multiplied
};

// A value that the subject draws by itself, such as a dropout mask. It is seen through an output:
// on the given inputs, constant over their elements, that output is a function of the element's
// draw alone. It has the output's layout: copies of it (I, R) must agree, shards of it (S, V) must
// differ.
struct Drawn {
  std::string name;                                   // "dropout1.mask"
  std::string output;                                 // operand that shows it
  std::vector<std::pair<std::string, double>> given;  // inputs and parameters by name
  double bits = 0;  // of an element: -log2 of the chance that two independent draws are equal
};

// One local matrix product of a rank, C[m,n] += A[m,k] B[k,n], for `explain`.
struct Gemm {
  std::string what;  // "Y = X W^T"
  bool backward = false;
  int64_t m = 0, n = 0, k = 0;
};

// What each place of an axis works on, for `explain`: "F0", "B3" of a tick; "" where it has none.
struct Schedule {
  Axis axis;
  std::string legend;
  std::vector<std::vector<std::string>> work;  // by place, by tick
};

// What has come to a rank by shifts along a group and was not answered yet by shifts the other way,
// in elements: at most so much at once.
struct Unanswered {
  std::string label;
  int hop = 1;  // of what comes
  int64_t most = 0;
  std::string means;  // that there is more
};

// Results of a phase that are off, where their values tell nothing by themselves.
struct Off {
  std::vector<std::string> names;
  // Would they all pass on the line with another value of a key?
  std::function<bool(const std::string& key, const std::string& value)> pass_with;
};

struct Contract {
  std::string name, family, summary;
  bool linear = false;    // linear in every input for the others fixed
  bool rounds = false;    // at every size, though it is linear: there are no exact data
  std::vector<Key> keys;  // its own; the common ones are added
  // Depends on values equal on all ranks only. A line that it refuses is exit 2.
  std::function<std::optional<Rejected>(const Case&)> precondition;
  // Inputs and parameters first, then outputs.
  std::function<std::vector<Operand>(const Case&)> operands;
  std::function<std::vector<Whole>(const Case&, std::span<const Whole> inputs, std::vector<Gauge>*)>
      forward;
  // Gradients for each input and parameter in order (empty Whole where none is due). Null: nothing
  // of the contract has a backward, and a subject need not say so; gradients may be results.
  std::function<std::vector<Whole>(const Case&, std::span<const Whole> inputs,
                                   std::span<const Whole> cotangents, std::vector<Gauge>*)>
      backward;
  // Calls due on a rank in order, for a plan ("" is the default plan).
  std::function<std::vector<Traffic>(const Case&, const std::string& plan, int rank)> traffic;
  std::vector<std::string> plans = {};  // that `traffic` knows beside the default
  // Integers of [-B, B] keep every intermediate exact; empty: no such range at this size and dtype.
  std::function<std::optional<int64_t>(const Case&)> integer_range;
  // Lines draw integers where they say nothing else, and their results are compared exactly.
  bool has_exact_data() const { return linear && !rounds; }
  // Where another reason than long sums leaves none: what the line has, and what to use in its
  // place. Null: there is no other.
  struct Inexact {
    std::string has, use;
  };
  std::function<std::optional<Inexact>(const Case&)> inexact = nullptr;
  // Case lines of a tier (smoke, ci, nightly), without transport. ci includes smoke's.
  std::function<std::vector<std::string>(const std::string& tier)> cases;
  // Lines that must be refused, for the check `rejection`.
  std::vector<std::string> illegal;
  // One line for the operators at each of np = 2, 3, 4 and 2x2; empty: taken from cases.
  std::vector<std::string> witnesses;
  // Local matrix products of a rank; null where there are none.
  std::function<std::vector<Gemm>(const Case&, int rank)> gemms;
  // Multiplications of a truth beside those of `gemms` and of pairs that are `visible`; null: a few
  // for each element.
  std::function<double(const Case&)> further_work;
  // What the subject draws on a line; null where it draws nothing. Under other values of `draw_key`
  // the draws are independent; "": there is no such key.
  std::function<std::vector<Drawn>(const Case&)> drawn;
  std::string draw_key;
  // Attention and packed rows: what the checks mask, coverage and leak judge by; null elsewhere. A
  // token is a row of the leading dims of an operand, row-major.
  // [queries, keys]: 1 where the query may see the key.
  std::function<std::vector<uint8_t>(const Case&)> visible;
  // (query, key) pairs that are due on a rank, in closed form.
  std::function<int64_t(const Case&, int rank)> pairs;
  // Sequence of each token of an input or output, -1 where it is padding: nothing of one reaches
  // another, nothing of padding reaches any.
  std::function<std::vector<int64_t>(const Case&, const Operand&)> sequences;
  // Who works on what and when; null where a line says nothing about it.
  std::function<Schedule(const Case&)> timetable = nullptr;
  // What `ledger` holds the order of calls to, whoever states them; null: nothing.
  std::function<std::optional<Unanswered>(const Case&, int rank)> unanswered = nullptr;
  // What it means that these are off and the others right; "" where that says nothing. Null: never
  // does.
  std::function<std::string(const Case&, const Off&)> meaning = nullptr;
  // True where it varies faster than the steps of finite differences: gradcheck is not due there.
  std::function<bool(const Case&)> stiff;
};

// A line that the contract refuses. Of such a line nothing else is asked of it: not its traffic.
inline bool illegal(const Contract& c, const Case& line) {
  return c.precondition && c.precondition(line).has_value();
}

// Calls due of a subject: its own where it states them, else the contract's under its plan, and of
// one that declares the type of its sums as if the line said acc=. Groups are called as they are on
// the line, where an axis may have one rank.
std::vector<Traffic> traffic_due(const Contract&, const Declared&, const Case&, int rank);

// A deliberately broken subject (or a healthy one on a faulty collective).
struct Control {
  std::string name, contract;
  // Null: the healthy subject under `fault`.
  std::function<std::unique_ptr<Kernel>()> make = nullptr;
  std::string fault = "";     // operator spec applied to the healthy subject
  std::string check = "";     // that must catch it; several by comma: all must fire
  std::string silent = "";    // checks that must not fire
  bool alone = false;         // no other check may fire
  std::string imitates = "";  // the public bug
  std::string witness = "";   // case line on which it provably differs
  std::string makes_visible = "";
  Declared declared = {};
};

}  // namespace shardproof
