// What is cut by the vocabulary: rows of the embedding's table, classes of the logits that the loss
// is taken of. The embedding is linear in the table; its sums have few terms, of which integers
// make exact ones.
#include "suites/vocab.hpp"

#include <algorithm>
#include <map>

#include "fixtures/fills.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/vocab_cross_entropy.hpp"
#include "primitives/vocab_embedding.hpp"
#include "primitives/vocab_line.hpp"
#include "primitives/vocab_log_softmax.hpp"
#include "reference/embedding.hpp"
#include "reference/loss.hpp"
#include "suites/linear.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"

namespace shardproof {
namespace vocab {

using namespace linears;

std::vector<int64_t> integers(const Whole& w) { return {w.value.begin(), w.value.end()}; }

std::vector<int64_t> shape_of_tokens(const Case& c) {
  std::vector<int64_t> shape = token_shape(c, 1);
  shape.pop_back();
  return shape;
}
Operand ids_of(const Case& c, const char* name) {
  Operand ids{name, Operand::index, shape_of_tokens(c), tokens_on(I()), false};
  ids.dtype_override = *dtype_from(c.text("index")), ids.fixed_dtype = true;
  ids.below = c.at("vocab");
  return ids;
}

Operand labels_of(const Case& c) {
  Operand labels = ids_of(c, "labels");
  if (const int64_t n = c.at("ignored"); n > 0)
    for (int64_t t = 0; t < product(labels.shape); ++t)
      labels.stated.push_back(t % n == n - 1 ? double(reference::ignored_label)
                                             : draw_index(c.seed(), labels.name, c.at("vocab"), t));
  return labels;
}

Key index_key(const char* what) {
  Key k{"index", "i64", what};
  k.choices = {"i64", "i32"};
  return k;
}
Key ignored_key() { return extent("ignored", "0", 0, "one label in so many is -100; 0: none"); }

}  // namespace vocab

namespace {

using namespace linears;
using namespace vocab;
using reference::Values;

// ---- Embedding

std::vector<Operand> embedding_operands(const Case& c) {
  return {ids_of(c, "ids"),
          {"w",
           Operand::parameter,
           {c.at("padded_vocab"), c.at("hidden")},
           parameter_on(S(0)),
           true,
           0},
          {"y", Operand::output, token_shape(c, c.at("hidden")), tokens_on(c.on("sp") ? S(0) : I()),
           true, 0}};
}

// One row is copied, zeros are added to it: nothing rounds.
std::vector<Whole> embedding_forward(const Case& c, std::span<const Whole> in,
                                     std::vector<Gauge>* gauges) {
  if (gauges) *gauges = {{}};
  return {whole(token_shape(c, c.at("hidden")),
                reference::embedding(in[1].value, integers(in[0]), c.at("hidden")))};
}

int64_t most_of_one_id(const std::vector<int64_t>& ids) {
  std::map<int64_t, int64_t> count;
  int64_t most = 1;
  for (int64_t id : ids) most = std::max(most, ++count[id]);
  return most;
}

std::vector<Whole> embedding_backward(const Case& c, std::span<const Whole> in,
                                      std::span<const Whole> cot, std::vector<Gauge>* gauges) {
  const auto ids = integers(in[0]);
  const auto sums = [&](const Values& g) {
    return reference::embedding_backward(ids, c.at("padded_vocab"), c.at("hidden"), g);
  };
  if (gauges) {
    Gauge g;
    g.magnitude = sums(reference::absolute(cot[0].value));
    g.terms = most_of_one_id(ids);
    *gauges = {{}, g};
  }
  return {{}, whole(in[1].shape, sums(cot[0].value))};
}

std::vector<Traffic> embedding_traffic(const Case& c, const std::string&, int) {
  const Local l(c);
  if (l.p == 1) return {};
  const int64_t y = l.tokens * c.at("hidden");
  if (!l.sp) return {call(Op::all_reduce, false, y, c.dtype())};
  return {call(Op::reduce_scatter, false, y, c.dtype()),
          call(Op::all_gather, true, y / l.p, c.dtype())};
}

std::vector<Key> embedding_keys() {
  std::vector<Key> keys = token_keys();
  keys.push_back(extent("hidden", "5", 1, "columns of w"));
  keys.push_back(extent("vocab", "48", 1, "ids are below it"));
  Key rows =
      extent("padded_vocab", "", 1, "rows of w, those from vocab on padding; left out: vocab");
  rows.derive = [](const Case& c) { return c.text("vocab"); };
  keys.push_back(rows);
  keys.push_back(index_key("type of the ids"));
  keys.push_back(toggle("sp", "off", "sequence parallel: tokens of y are cut over tp"));
  keys.push_back(microbatches_key());
  return keys;
}

// Lines of a vocabulary beyond 2^8 (bf16) and 2^11 (f16) have ids that are no numbers of their
// type.
std::vector<std::string> embedding_cases(const std::string& tier) {
  const auto smoke =
      crossed({"vocab_embedding"},
              {"tp=2", "tp=4 sp=on seq=8 batch=3 strides=transposed",
               "tp=2 sp=on tokens=6 vocab=8 hidden=3", "tp=4 tokens=6 vocab=8 hidden=3",
               "tp=2 sp=on vocab=600 dtype=bf16 index=i32", "tp=4 dtype=f32 fill=normal",
               "tp=2 dp=2 sp=on", "tp=2 sp=on microbatches=2", "tp=4 vocab=45 padded_vocab=48"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"vocab_embedding", "vocab_embedding tp=2",
                                       "vocab_embedding tp=3", "vocab_embedding tp=4",
                                       "vocab_embedding tp=8"};
  const std::vector<std::string> sp{"", "sp=on"};
  const auto ci = together(
      {smoke,
       crossed(crossed(ranks, sp), {"", "dtype=f32", "dtype=bf16", "dtype=f16"}),
       crossed(crossed({"vocab_embedding tp=3", "vocab_embedding tp=8"}, sp),
               {"fill=normal", "dtype=bf16 fill=normal", "dtype=f16 fill=normal",
                "dtype=f32 acc=f64 fill=normal", "dtype=f32 fill=large",
                "dtype=f32 fill=cancelling", "vocab=24 tokens=72 fill=normal"}),
       crossed(crossed({"vocab_embedding tp=2 dp=2", "vocab_embedding tp=4 dp=2",
                        "vocab_embedding tp=2 cp=2", "vocab_embedding tp=2 cp=2 dp=2",
                        "vocab_embedding tp=2 dp=2 order=dp,tp"},
                       sp),
               {""}),
       crossed(
           crossed({"vocab_embedding tp=4"}, sp),
           {"strides=transposed", "strides=expanded", "seq=8 batch=3", "index=i32",
            "vocab=1 padded_vocab=8", "hidden=1", "microbatches=3",
            "microbatches=2 dtype=bf16 grad=f32 fill=normal", "seq=8 batch=3 strides=transposed",
            "vocab=4998 padded_vocab=5008 index=i32 dtype=f16"}),
       {"vocab_embedding tp=4 vocab=4 tokens=48", "vocab_embedding tp=2 tokens=1 vocab=2 hidden=3",
        "vocab_embedding dp=2", "vocab_embedding cp=4"}});
  if (tier != "nightly") return ci;
  return together(
      {ci, crossed(crossed({"vocab_embedding tp=5 vocab=130", "vocab_embedding tp=6 vocab=30",
                            "vocab_embedding tp=8 vocab=504 hidden=33"},
                           {"tokens=240", "tokens=240 sp=on"}),
                   {"", "dtype=f32 fill=normal", "dtype=bf16", "seed=2"})});
}

Contract vocab_embedding() {
  Contract c;
  c.name = "vocab_embedding";
  c.family = "vocab";
  c.summary = "rows of W by id, rows of W cut over tp";
  c.linear = true;
  c.keys = embedding_keys();
  c.precondition = primitives::refused_embedding;
  c.operands = embedding_operands;
  c.forward = embedding_forward;
  c.backward = embedding_backward;
  c.traffic = embedding_traffic;
  // The gradient of a row sums over the tokens of a step, all of which may name it.
  c.integer_range = [](const Case& line) {
    return range_of_products(line, line.at("tokens") * line.at("microbatches"), 1);
  };
  c.cases = embedding_cases;
  c.illegal = {"vocab_embedding tp=4 vocab=10",
               "vocab_embedding tp=4 padded_vocab=50",
               "vocab_embedding tp=2 vocab=50 padded_vocab=48",
               "vocab_embedding tp=4 sp=on tokens=10",
               "vocab_embedding tp=2 sp=on seq=3 batch=2",
               "vocab_embedding tp=2 dp=2 tokens=9",
               "vocab_embedding tp=2 batch=2",
               "vocab_embedding tp=2 seq=8 batch=3 tokens=20",
               "vocab_embedding tp=2 ep=2"};
  c.witnesses = {"vocab_embedding tp=2", "vocab_embedding tp=3 sp=on", "vocab_embedding tp=4 sp=on",
                 "vocab_embedding tp=2 dp=2 sp=on", "vocab_embedding tp=4"};
  return c;
}

// ---- Cross-entropy

double alpha_of(const Case& c) { return reading::number(c, "label_smoothing"); }
// The label is left 1 - s and every class, it too, is given s/V.
double share_of(const Case& c) {
  const double V = double(c.at("vocab"));
  return c.text("smoothing") == "others" ? alpha_of(c) * V / (V - 1) : alpha_of(c);
}
std::vector<Operand> loss_operands(const Case& c) {
  const auto logits = token_shape(c, c.at("vocab"));
  Operand loss{"loss", Operand::output, shape_of_tokens(c), tokens_on(I())};
  loss.dtype_override = loss_type(c), loss.fixed_dtype = true;
  return {{"logits", Operand::input, logits, tokens_on(S(last(logits)))}, labels_of(c), loss};
}

// In unit roundoffs of the accumulation; the reference rounds as well.
reference::CrossEntropyErrors errors_of(const Case& c, std::span<const Whole> in) {
  const double u = precision_of(c, Declared{}).u_acc;
  auto errors = reference::shifted_cross_entropy_errors(in[0].value, integers(in[1]), c.at("vocab"),
                                                        share_of(c), u + unit_roundoff(DType::f64),
                                                        smallest_subnormal(accumulation_of(c)));
  for (Values* list : {&errors.loss, &errors.logits})
    for (double& e : *list) e /= u;
  return errors;
}

std::vector<Whole> loss_forward(const Case& c, std::span<const Whole> in,
                                std::vector<Gauge>* gauges) {
  if (gauges) {
    Gauge g;
    g.bound = errors_of(c, in).loss;
    *gauges = {g};
  }
  return {whole(shape_of_tokens(c), reference::cross_entropy(in[0].value, integers(in[1]),
                                                             c.at("vocab"), share_of(c)))};
}

std::vector<Whole> loss_backward(const Case& c, std::span<const Whole> in,
                                 std::span<const Whole> cot, std::vector<Gauge>* gauges) {
  if (gauges) {
    Gauge g;
    g.bound = errors_of(c, in).logits;
    for (size_t i = 0; i < g.bound.size(); ++i)
      g.bound[i] *= std::abs(cot[0].value[i / size_t(c.at("vocab"))]);
    *gauges = {g, {}};
  }
  return {whole(in[0].shape,
                reference::cross_entropy_backward(in[0].value, integers(in[1]), c.at("vocab"),
                                                  share_of(c), cot[0].value)),
          {}};
}

std::vector<Traffic> loss_traffic(const Case& c, const std::string&, int) {
  const Local l(c);
  if (l.p == 1) return {};
  const Traffic sum = call(Op::all_reduce, false, l.tokens, accumulation_of(c));
  Traffic maximum = sum;
  maximum.reduce = Reduce::max, maximum.cancels = true;
  std::vector<Traffic> due{maximum};
  due.resize(alpha_of(c) > 0 ? 4 : 3, sum);
  return due;
}

std::vector<Key> loss_keys() {
  std::vector<Key> keys = token_keys();
  keys.push_back(extent("vocab", "48", 2, "classes"));
  keys.push_back(share("label_smoothing", "0", "alpha, the share of a label that others get"));
  Key how{"smoothing", "all",
          "all: alpha/V on every class (PyTorch); others: alpha/(V-1) on every class but the "
          "label (Megatron)"};
  how.choices = {"all", "others"};
  keys.push_back(how);
  keys.push_back(ignored_key());
  keys.push_back(index_key("type of the labels"));
  return keys;
}

// What few lines show: labels that are no numbers of the type of the logits (vocab=600, 4100); a
// label 100 below the first class of a rank, which is -100 to a kernel that subtracts before it
// asks (vocab=400 of 8 ranks); logits that are all far below 0, which a maximum that starts at 0
// leaves without a term (vocab=2 fill=large).
std::vector<std::string> loss_cases(const std::string& tier) {
  const std::string smoothed = "label_smoothing=0.1";
  const auto smoke = crossed(
      {"vocab_cross_entropy"},
      {"tp=2", "tp=4 ignored=5", "tp=4 ignored=5 " + smoothed,
       "tp=2 ignored=5 smoothing=others " + smoothed, "tp=4 vocab=600 dtype=bf16",
       "tp=2 dp=2 seq=8 batch=3 strides=transposed", "tp=2 vocab=2 fill=large " + smoothed});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"vocab_cross_entropy", "vocab_cross_entropy tp=2",
                                       "vocab_cross_entropy tp=3", "vocab_cross_entropy tp=4",
                                       "vocab_cross_entropy tp=8"};
  const std::vector<std::string> how{"", smoothed, "ignored=5 smoothing=others " + smoothed};
  const auto ci = together(
      {smoke,
       crossed(crossed(ranks, how), {"", "dtype=f32", "dtype=bf16"}),
       crossed(crossed({"vocab_cross_entropy tp=3", "vocab_cross_entropy tp=8"}, how),
               {"dtype=f16", "fill=large", "dtype=f32 fill=large", "dtype=f32 acc=f64",
                "dtype=bf16 fill=large", "fill=cancelling dtype=f32"}),
       crossed({"vocab_cross_entropy tp=2 dp=2", "vocab_cross_entropy tp=4 dp=2",
                "vocab_cross_entropy tp=2 cp=2", "vocab_cross_entropy tp=2 cp=2 dp=2",
                "vocab_cross_entropy tp=2 dp=2 order=dp,tp"},
               {"ignored=5 " + smoothed}),
       crossed({"vocab_cross_entropy tp=4 " + smoothed},
               {"strides=transposed", "strides=expanded", "strides=expanded_inputs dtype=f32",
                "seq=8 batch=3", "seq=8 batch=3 strides=transposed", "index=i32", "vocab=4",
                "ignored=2", "tokens=1"}),
       {"vocab_cross_entropy tp=2 vocab=2 smoothing=others " + smoothed,
        "vocab_cross_entropy tp=2 vocab=2 dtype=f32 fill=large",
        "vocab_cross_entropy tp=4 fill=large " + smoothed,
        "vocab_cross_entropy tp=4 vocab=512 dtype=f32",
        "vocab_cross_entropy tp=8 vocab=400 tokens=120 dtype=bf16",
        "vocab_cross_entropy tp=2 tokens=12 vocab=4100 dtype=f16",
        "vocab_cross_entropy tp=4 label_smoothing=0.99 smoothing=others",
        "vocab_cross_entropy dp=2", "vocab_cross_entropy cp=4"}});
  if (tier != "nightly") return ci;
  return together({ci, crossed(crossed({"vocab_cross_entropy tp=5 vocab=130",
                                        "vocab_cross_entropy tp=6 vocab=1002",
                                        "vocab_cross_entropy tp=8 vocab=504 tokens=72"},
                                       how),
                               {"", "dtype=f32", "dtype=bf16", "dtype=f32 fill=large", "seed=2"})});
}

Contract vocab_cross_entropy() {
  Contract c;
  c.name = "vocab_cross_entropy";
  c.family = "vocab";
  c.summary = "loss of every token, classes of the logits cut over tp";
  c.keys = loss_keys();
  c.precondition = primitives::refused_vocab_loss;
  c.operands = loss_operands;
  c.forward = loss_forward;
  c.backward = loss_backward;
  c.traffic = loss_traffic;
  c.cases = loss_cases;
  c.illegal = {"vocab_cross_entropy tp=4 vocab=10",
               "vocab_cross_entropy tp=2 dp=2 tokens=9",
               "vocab_cross_entropy tp=2 seq=3 batch=2 dp=2",
               "vocab_cross_entropy tp=2 batch=2",
               "vocab_cross_entropy tp=2 seq=8 batch=3 tokens=20",
               "vocab_cross_entropy tp=2 ep=2",
               "vocab_cross_entropy tp=2 pp=2"};
  // So much of the labels is smoothed that the last bits of sum (z - m) reach the loss, of some of
  // the tokens: those of tp=4, where an order of four parts may change few of them, are many.
  const std::string how = " ignored=5 label_smoothing=0.9";
  c.witnesses = {"vocab_cross_entropy tp=2" + how, "vocab_cross_entropy tp=3" + how,
                 "vocab_cross_entropy tp=4 tokens=96" + how + " smoothing=others",
                 "vocab_cross_entropy tp=2 dp=2" + how};
  return c;
}

// ---- Log-softmax

std::vector<Operand> softmax_operands(const Case& c) {
  const auto logits = token_shape(c, c.at("vocab"));
  Operand y{"y", Operand::output, logits, tokens_on(S(last(logits)))};
  y.dtype_override = loss_type(c), y.fixed_dtype = true;
  return {{"logits", Operand::input, logits, tokens_on(S(last(logits)))}, y};
}

// In unit roundoffs of the accumulation; the reference rounds as well. g: the cotangent, or none.
reference::LogSoftmaxErrors softmax_errors_of(const Case& c, const Whole& logits, reference::In g) {
  const double u = precision_of(c, Declared{}).u_acc, of_reference = unit_roundoff(DType::f64);
  auto errors = reference::log_softmax_errors(logits.value, c.at("vocab"), g, u + of_reference,
                                              std::max(u, unit_roundoff(loss_type(c))),
                                              smallest_subnormal(accumulation_of(c)));
  for (Values* list : {&errors.y, &errors.logits})
    for (double& e : *list) e /= u;
  return errors;
}

std::vector<Whole> softmax_forward(const Case& c, std::span<const Whole> in,
                                   std::vector<Gauge>* gauges) {
  if (gauges) {
    Gauge g;
    g.bound = softmax_errors_of(c, in[0], {}).y;
    *gauges = {g};
  }
  return {whole(in[0].shape, reference::log_softmax(in[0].value, c.at("vocab")))};
}

std::vector<Whole> softmax_backward(const Case& c, std::span<const Whole> in,
                                    std::span<const Whole> cot, std::vector<Gauge>* gauges) {
  if (gauges) {
    Gauge g;
    g.bound = softmax_errors_of(c, in[0], cot[0].value).logits;
    *gauges = {g};
  }
  return {whole(in[0].shape,
                reference::log_softmax_backward(in[0].value, c.at("vocab"), cot[0].value))};
}

std::vector<Traffic> softmax_traffic(const Case& c, const std::string&, int) {
  const Local l(c);
  if (l.p == 1) return {};
  const Traffic sum = call(Op::all_reduce, false, l.tokens, accumulation_of(c));
  Traffic maximum = sum, of_cotangents = sum;
  maximum.reduce = Reduce::max, maximum.cancels = true;
  of_cotangents.backward = true;
  return {maximum, sum, of_cotangents};
}

std::vector<std::string> softmax_cases(const std::string& tier) {
  const auto smoke = crossed(
      {"vocab_log_softmax"},
      {"tp=2", "tp=4 dtype=bf16", "tp=2 dp=2 seq=8 batch=3 strides=transposed", "tp=4 fill=large"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"vocab_log_softmax", "vocab_log_softmax tp=2",
                                       "vocab_log_softmax tp=3", "vocab_log_softmax tp=4",
                                       "vocab_log_softmax tp=8"};
  const auto ci = together(
      {smoke, crossed(ranks, {"", "dtype=f32", "dtype=bf16"}),
       crossed({"vocab_log_softmax tp=3", "vocab_log_softmax tp=8"},
               {"dtype=f16", "fill=large", "dtype=f32 fill=large", "dtype=f32 acc=f64",
                "dtype=bf16 fill=large", "dtype=f32 fill=cancelling"}),
       crossed({"vocab_log_softmax"},
               {"tp=4 dp=2", "tp=2 cp=2 dp=2", "tp=2 dp=2 order=dp,tp", "tp=4 strides=transposed",
                "tp=4 strides=expanded", "tp=4 strides=expanded_inputs dtype=f32", "tp=4 vocab=4",
                "tp=4 tokens=1", "tp=2 vocab=2 dtype=f32 fill=large", "tp=4 vocab=512 dtype=f32",
                "dp=2", "cp=4"})});
  if (tier != "nightly") return ci;
  return together({ci, crossed(crossed({"vocab_log_softmax"}, {"tp=5 vocab=130", "tp=6 vocab=1002",
                                                               "tp=8 vocab=504 tokens=72"}),
                               {"", "dtype=f32", "dtype=bf16", "dtype=f32 fill=large", "seed=2"})});
}

Contract vocab_log_softmax() {
  Contract c;
  c.name = "vocab_log_softmax";
  c.family = "vocab";
  c.summary = "log-probabilities, classes cut over tp";
  c.keys = token_keys();
  c.keys.push_back(extent("vocab", "48", 1, "classes"));
  c.precondition = primitives::refused_vocab_loss;
  c.operands = softmax_operands;
  c.forward = softmax_forward;
  c.backward = softmax_backward;
  c.traffic = softmax_traffic;
  c.cases = softmax_cases;
  c.illegal = {"vocab_log_softmax tp=4 vocab=10",
               "vocab_log_softmax tp=2 dp=2 tokens=9",
               "vocab_log_softmax tp=2 seq=3 batch=2 dp=2",
               "vocab_log_softmax tp=2 batch=2",
               "vocab_log_softmax tp=2 seq=8 batch=3 tokens=20",
               "vocab_log_softmax tp=2 ep=2",
               "vocab_log_softmax tp=2 pp=2"};
  c.witnesses = {"vocab_log_softmax tp=2", "vocab_log_softmax tp=3", "vocab_log_softmax tp=4",
                 "vocab_log_softmax tp=2 dp=2"};
  return c;
}

}  // namespace

void family_vocab(Registry& r) {
  r.add(vocab_embedding());
  r.add(vocab_cross_entropy());
  r.add(vocab_log_softmax());
  add_ours<primitives::VocabEmbedding>(r, "vocab_embedding");
  add_ours<primitives::VocabCrossEntropy>(r, "vocab_cross_entropy");
  add_ours<primitives::VocabLogSoftmax>(r, "vocab_log_softmax");
}

}  // namespace shardproof
