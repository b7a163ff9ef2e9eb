// The bodies that an executor has to run, by group: a group is one file of kernels on a device.
#pragma once
#include "primitives/attention_tiles.hpp"
#include "primitives/clip.hpp"
#include "primitives/delta_rule.hpp"
#include "primitives/eight_bits.hpp"
#include "primitives/expert_rows.hpp"
#include "primitives/gate.hpp"
#include "primitives/norm_rows.hpp"
#include "primitives/optimizer.hpp"
#include "primitives/pointwise.hpp"
#include "primitives/recurrences.hpp"
#include "primitives/rotary_pairs.hpp"
#include "primitives/token_loss.hpp"
#include "primitives/vocab_shard.hpp"

#define SHARDPROOF_POINTWISE_BODIES(each)                                       \
  each(Convert) each(Fill) each(Scale) each(Combine) each(AddRow) each(Dropout) \
      each(InitialValues) each(ColumnSums)
#define SHARDPROOF_GATE_BODIES(each)                                                          \
  each(Activated) each(ActivatedSquares) each(InverseRoot) each(AlongValue) each(GammaOfGate) \
      each(ActivatedBackward)
#define SHARDPROOF_NORM_BODIES(each) each(NormForward) each(NormBackward) each(NormParameter)
#define SHARDPROOF_CLIP_BODIES(each) each(SumOfSquares) each(SquareRoot) each(Clipped)
#define SHARDPROOF_OPTIMIZER_BODIES(each) \
  each(AdamStep) each(MomentumStep) each(Normalised) each(NotFinite)
#define SHARDPROOF_EIGHT_BITS_BODIES(each) \
  each(AbsoluteMaximum) each(Scales) each(Quantise) each(Dequantise)
#define SHARDPROOF_ROTARY_BODIES(each) each(RotaryPairs)
#define SHARDPROOF_LOSS_BODIES(each) \
  each(TokenLoss) each(LossSums) each(LossMean) each(LossGradient)

#define SHARDPROOF_RECURRENCE_BODIES(each)                                            \
  each(ConvForward) each(ConvInput) each(ConvParameter) each(States) each(Adjoints)   \
      each(DecayOfLogarithm) each(ChunkDecay) each(FoldStates) each(StateProduct)     \
          each(DecayGradient) each(DeltaStates) each(DeltaAdjoints) each(TakeThrough) \
              each(DeltaErrors) each(DeltaKeys) each(DeltaSteps)

#define SHARDPROOF_VOCAB_BODIES(each)                                                 \
  each(LookUp) each(ScatterAdd) each(ShardMaximum) each(ShardSums) each(LossOfShards) \
      each(ShardGradient) each(ShardExps) each(LogProbabilities) each(CotangentSum)   \
          each(LogSoftmaxGradient) each(ShardScores) each(TokenLogProbs) each(LogProbGradient)

#define SHARDPROOF_EXPERT_BODIES(each) \
  each(TakeRows) each(WeighedRows) each(RowsOfToken) each(ProbGradient)

// Each of these has a kernel for every type of factors.
#define SHARDPROOF_ATTEND_BODIES(each) each(AttendBlock) each(AttentionOutput) each(AttentionDelta)
#define SHARDPROOF_QUERY_GRADIENT_BODIES(each) each(QueryGradient)
#define SHARDPROOF_KEY_GRADIENT_BODIES(each) each(KeyGradient)
#define SHARDPROOF_VALUE_GRADIENT_BODIES(each) each(ValueGradient)

#define SHARDPROOF_BODIES(each)          \
  SHARDPROOF_POINTWISE_BODIES(each)      \
  SHARDPROOF_GATE_BODIES(each)           \
  SHARDPROOF_NORM_BODIES(each)           \
  SHARDPROOF_CLIP_BODIES(each)           \
  SHARDPROOF_OPTIMIZER_BODIES(each)      \
  SHARDPROOF_EIGHT_BITS_BODIES(each)     \
  SHARDPROOF_ROTARY_BODIES(each)         \
  SHARDPROOF_LOSS_BODIES(each)           \
  SHARDPROOF_RECURRENCE_BODIES(each)     \
  SHARDPROOF_VOCAB_BODIES(each)          \
  SHARDPROOF_EXPERT_BODIES(each)         \
  SHARDPROOF_ATTEND_BODIES(each)         \
  SHARDPROOF_QUERY_GRADIENT_BODIES(each) \
  SHARDPROOF_KEY_GRADIENT_BODIES(each)   \
  SHARDPROOF_VALUE_GRADIENT_BODIES(each)
