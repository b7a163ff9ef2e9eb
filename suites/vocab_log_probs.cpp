// Log-probabilities of labels and entropies of a policy whose logits are cut by the vocabulary, as
// reinforcement learning takes them: it joins the vocab family.
#include "primitives/vocab_log_probs.hpp"
#include <limits>

#include "fixtures/fills.hpp"
#include "oracle/check.hpp"
#include "oracle/registry.hpp"
#include "primitives/vocab_line.hpp"
#include "reference/loss.hpp"
#include "suites/linear.hpp"
#include "suites/ours.hpp"
#include "suites/reading.hpp"
#include "suites/vocab.hpp"

namespace shardproof {
namespace {

using namespace linears;
using namespace vocab;
using reference::Values;

double temperature_of(const Case& c) { return reading::number(c, "temperature", 1); }

// As padding of the vocabulary, or classes beyond the first k, are masked: the probability is 0.
double masked_logit(const Case& c) {
  return c.text("mask_logit") == "inf" ? -std::numeric_limits<double>::infinity() : -0x1p14;
}
bool is_masked(const Case& c, int64_t label) {
  const int64_t n = c.at("masked");
  return n > 0 && label >= 0 && label % n == n - 1;
}

Operand logits_of(const Case& c) {
  const auto shape = token_shape(c, c.at("vocab"));
  Operand logits{"logits", Operand::input, shape, tokens_on(S(last(shape)))};
  if (c.at("masked") > 0)
    logits.made = [=](uint64_t seed) {
      auto values = draw_whole({fill_of(c), seed, 1, -1}, "logits", c.dtype(), shape);
      for (size_t i = 0; i < values.size(); ++i)
        if (is_masked(c, int64_t(i) % c.at("vocab"))) values[i] = masked_logit(c);
      return values;
    };
  return logits;
}

// The log-probability of a class of -inf is no number: the class before has the label.
Operand labels_beside_masked(const Case& c) {
  Operand labels = labels_of(c);
  if (c.at("masked") == 0 || c.text("mask_logit") == "finite") return labels;
  if (labels.stated.empty())
    for (int64_t t = 0; t < product(labels.shape); ++t)
      labels.stated.push_back(draw_index(c.seed(), labels.name, c.at("vocab"), t));
  for (double& label : labels.stated) label -= is_masked(c, int64_t(label));
  return labels;
}

std::vector<Operand> operands(const Case& c) {
  Operand log_probs{"log_probs", Operand::output, shape_of_tokens(c), tokens_on(I())};
  log_probs.dtype_override = loss_type(c), log_probs.fixed_dtype = true;
  Operand entropy = log_probs;
  entropy.name = "entropy";
  return {logits_of(c), labels_beside_masked(c), log_probs, entropy};
}

// In unit roundoffs of the accumulation; the reference rounds as well. Cotangents: both, or none.
reference::LogProbErrors errors_of(const Case& c, std::span<const Whole> in,
                                   std::span<const Whole> cot) {
  const double u = precision_of(c, Declared{}).u_acc;
  const auto of = [&](size_t output) {
    return cot.empty() ? reference::In{} : reference::In(cot[output].value);
  };
  auto errors = reference::log_probs_errors(
      in[0].value, integers(in[1]), c.at("vocab"), temperature_of(c), of(0), of(1),
      u + unit_roundoff(DType::f64), smallest_subnormal(accumulation_of(c)));
  for (Values* list : {&errors.log_probs, &errors.entropy, &errors.logits})
    for (double& e : *list) e /= u;
  return errors;
}

std::vector<Whole> forward(const Case& c, std::span<const Whole> in, std::vector<Gauge>* gauges) {
  if (gauges) {
    auto errors = errors_of(c, in, {});
    Gauge of_log_probs, of_entropy;
    of_log_probs.bound = std::move(errors.log_probs), of_entropy.bound = std::move(errors.entropy);
    *gauges = {of_log_probs, of_entropy};
  }
  auto due = reference::log_probs(in[0].value, integers(in[1]), c.at("vocab"), temperature_of(c));
  const auto shape = shape_of_tokens(c);
  return {whole(shape, std::move(due.log_probs)), whole(shape, std::move(due.entropy))};
}

std::vector<Whole> backward(const Case& c, std::span<const Whole> in, std::span<const Whole> cot,
                            std::vector<Gauge>* gauges) {
  if (gauges) {
    Gauge g;
    g.bound = errors_of(c, in, cot).logits;
    *gauges = {g, {}};
  }
  return {whole(in[0].shape,
                reference::log_probs_backward(in[0].value, integers(in[1]), c.at("vocab"),
                                              temperature_of(c), cot[0].value, cot[1].value)),
          {}};
}

std::vector<Traffic> traffic(const Case& c, const std::string&, int) {
  const Local l(c);
  if (l.p == 1) return {};
  const Traffic sum = call(Op::all_reduce, false, l.tokens, accumulation_of(c));
  Traffic maximum = sum;
  maximum.reduce = Reduce::max, maximum.cancels = true;
  return {maximum, sum, sum, sum};
}

std::vector<Key> keys() {
  std::vector<Key> keys = token_keys();
  keys.push_back(extent("vocab", "48", 2, "classes"));
  Key temperature{"temperature", "1", "logits are divided by it before the softmax"};
  temperature.valid = [](std::string_view text) -> std::string {
    const auto value = reading::decimal(text);
    if (value && *value >= 0.01 && *value <= 1e6) return "";
    return "a number from 0.01 to 1e6, such as 0.7 (at 0 there is no softmax: the greatest logit "
           "alone is taken)";
  };
  keys.push_back(temperature);
  keys.push_back(ignored_key());
  keys.push_back(extent("masked", "0", 0, "one class in so many is masked; 0: none"));
  keys.push_back(choice("mask_logit", {"finite", "inf"},
                        "the logit of a masked class, -16384 or -inf; -inf is no label's"));
  keys.push_back(index_key("type of the labels"));
  return keys;
}

// What few lines show: labels that are no numbers of the type of the logits (vocab=600);
// probabilities that are 0 (masked=3), whose logarithm, or whose logit, is not. Large logits have
// an entropy at a large temperature alone.
std::vector<std::string> cases(const std::string& tier) {
  const auto smoke =
      crossed({"vocab_log_probs"}, {"tp=2 temperature=0.7", "tp=4 ignored=5 vocab=600 dtype=bf16",
                                    "tp=2 dp=2 seq=8 batch=3 strides=transposed temperature=1.5",
                                    "tp=4 masked=3 dtype=f32", "tp=2 masked=3 mask_logit=inf"});
  if (tier == "smoke") return smoke;
  const std::vector<std::string> ranks{"vocab_log_probs", "vocab_log_probs tp=2",
                                       "vocab_log_probs tp=3", "vocab_log_probs tp=4",
                                       "vocab_log_probs tp=8"};
  const std::vector<std::string> how{"", "temperature=0.6 ignored=5"};
  const auto ci = together(
      {smoke,
       crossed(crossed(ranks, how), {"", "dtype=f32", "dtype=bf16"}),
       crossed(crossed({"vocab_log_probs tp=3", "vocab_log_probs tp=8"}, how),
               {"dtype=f16", "masked=3", "masked=2 mask_logit=inf dtype=f32",
                "masked=7 mask_logit=inf dtype=bf16", "dtype=f32 masked=3", "dtype=f32 acc=f64",
                "dtype=bf16 masked=5", "dtype=f16 masked=3", "fill=cancelling dtype=f32"}),
       crossed({"vocab_log_probs tp=2 dp=2", "vocab_log_probs tp=4 dp=2",
                "vocab_log_probs tp=2 cp=2 dp=2", "vocab_log_probs tp=2 dp=2 order=dp,tp"},
               {"temperature=2 ignored=5"}),
       crossed({"vocab_log_probs tp=4"},
               {"strides=expanded", "strides=expanded_inputs dtype=f32", "seq=8 batch=3",
                "index=i32", "vocab=4", "tokens=1", "vocab=512 dtype=f32 temperature=1.3",
                "temperature=100 dtype=f32", "temperature=0.1 dtype=f32",
                "temperature=262144 fill=large", "temperature=300000 fill=large dtype=f32"}),
       {"vocab_log_probs masked=5 mask_logit=inf", "vocab_log_probs tp=2 vocab=2 dtype=f32",
        "vocab_log_probs tp=4 vocab=4 masked=4 mask_logit=inf ignored=3",

        "vocab_log_probs tp=8 vocab=400 tokens=120 dtype=bf16", "vocab_log_probs dp=2",
        "vocab_log_probs cp=4"}});
  if (tier != "nightly") return ci;
  return together(
      {ci, crossed(crossed({"vocab_log_probs tp=5 vocab=130", "vocab_log_probs tp=6 vocab=1002",
                            "vocab_log_probs tp=8 vocab=504 tokens=72"},
                           how),
                   {"", "dtype=f32", "dtype=bf16", "dtype=f32 masked=7", "seed=2"})});
}

Contract vocab_log_probs() {
  Contract c;
  c.name = "vocab_log_probs";
  c.family = "vocab";
  c.summary = "log-probabilities of labels and entropies (RL), classes cut over tp";
  c.keys = keys();
  c.precondition = primitives::refused_log_probs;
  c.operands = operands;
  c.forward = forward;
  c.backward = backward;
  c.traffic = traffic;
  c.cases = cases;
  c.illegal = {"vocab_log_probs tp=4 vocab=10",
               "vocab_log_probs tp=2 dp=2 tokens=9",
               "vocab_log_probs tp=2 seq=3 batch=2 dp=2",
               "vocab_log_probs tp=2 batch=2",
               "vocab_log_probs tp=2 seq=8 batch=3 tokens=20",
               "vocab_log_probs tp=2 masked=1",
               "vocab_log_probs tp=2 ep=2",
               "vocab_log_probs tp=2 pp=2"};
  c.witnesses = {"vocab_log_probs tp=2 temperature=0.7", "vocab_log_probs tp=3 ignored=5",
                 "vocab_log_probs tp=4 temperature=0.7", "vocab_log_probs tp=2 dp=2"};
  return c;
}

}  // namespace

void family_vocab_log_probs(Registry& r) {
  r.add(vocab_log_probs());
  add_ours<primitives::VocabLogProbs>(r, "vocab_log_probs");
}

}  // namespace shardproof
