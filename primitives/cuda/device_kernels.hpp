// What a module of devices offers, by contract: the primitives themselves, linked with the module's
// executor, their work on the stream of the rank.
#pragma once
#include <array>

#include "oracle/device.hpp"
#include "primitives/attention_blockwise.hpp"
#include "primitives/block.hpp"
#include "primitives/conv_context.hpp"
#include "primitives/cuda/twins.hpp"
#include "primitives/delta_context.hpp"
#include "primitives/expert_alltoall.hpp"
#include "primitives/expert_balance.hpp"
#include "primitives/expert_mlp.hpp"
#include "primitives/linear.hpp"
#include "primitives/loss_packed.hpp"
#include "primitives/mapping.hpp"
#include "primitives/mixer_alltoall.hpp"
#include "primitives/mlp.hpp"
#include "primitives/muon_step.hpp"
#include "primitives/norm_sequence.hpp"
#include "primitives/pipeline.hpp"
#include "primitives/pipeline_schedule.hpp"
#include "primitives/quantised_gather.hpp"
#include "primitives/quantised_linear.hpp"
#include "primitives/replicated_layers.hpp"
#include "primitives/rotary_context.hpp"
#include "primitives/scan_context.hpp"
#include "primitives/sharded.hpp"
#include "primitives/sharded_step.hpp"
#include "primitives/vocab_cross_entropy.hpp"
#include "primitives/vocab_embedding.hpp"
#include "primitives/vocab_log_probs.hpp"
#include "primitives/vocab_log_softmax.hpp"
#include "primitives/zigzag_exchange.hpp"

namespace shardproof::cuda {

// A kernel whose work goes to the stream of its rank, its products in TF32 or not.
class OnRanksStream final : public Kernel {
 public:
  explicit OnRanksStream(std::unique_ptr<Kernel> kernel, bool tf32 = false)
      : kernel_(std::move(kernel)), tf32_(tf32) {}
  std::unique_ptr<Saved> forward(Rank& rank, std::span<const View> inputs,
                                 std::span<const View> outputs) override {
    const Scope scope(rank, tf32_);
    return kernel_->forward(rank, inputs, outputs);
  }
  void backward(Rank& rank, Saved& saved, std::span<const View> cotangents,
                std::span<const View> gradients) override {
    const Scope scope(rank, tf32_);
    kernel_->backward(rank, saved, cotangents, gradients);
  }
  void finish(Rank& rank, Saved& saved, std::span<const View> gradients) override {
    const Scope scope(rank, tf32_);
    kernel_->finish(rank, saved, gradients);
  }
  bool init(Rank& rank, std::span<const View> parameters) override {
    const Scope scope(rank, tf32_);
    return kernel_->init(rank, parameters);
  }

 private:
  struct Scope {
    Scope(Rank& rank, bool tf32) : stream(rank.stream()), products(tf32) {}
    primitives::OnStream stream;
    primitives::InTf32 products;
  };
  std::unique_ptr<Kernel> kernel_;
  bool tf32_;
};

template <auto make>
std::unique_ptr<Kernel> made() {
  return std::make_unique<OnRanksStream>(make());
}
template <class Primitive>
std::unique_ptr<Kernel> ours() {
  return std::make_unique<OnRanksStream>(std::make_unique<Primitive>());
}

template <class Primitive>
std::unique_ptr<Kernel> in_tf32() {
  return std::make_unique<OnRanksStream>(std::make_unique<Primitive>(), true);
}

template <primitives::Strategy strategy>
std::unique_ptr<Kernel> attention() {
  return std::make_unique<OnRanksStream>(primitives::blockwise_attention(strategy));
}

// primitives/cuda/twins.hpp
template <auto make>
constexpr DeviceKernel broken(const char* contract, const char* control) {
  return {contract, made<make>, control, ""};
}

inline constexpr std::array device_kernels = {
    DeviceKernel{"linear_column", ours<primitives::LinearColumn>},
    DeviceKernel{"linear_row", ours<primitives::LinearRow>},
    DeviceKernel{"sharded_linear", ours<primitives::ShardedLinear>},
    DeviceKernel{"sharded_step", ours<primitives::ShardedStep>},
    DeviceKernel{"muon_step", ours<primitives::MuonStep>},
    DeviceKernel{"pipeline_schedule", ours<primitives::PipelineSchedule>},
    DeviceKernel{"pipeline_stages", ours<primitives::PipelineStages>},
    DeviceKernel{"pipeline_tied", ours<primitives::PipelineTied>},
    DeviceKernel{"mlp", ours<primitives::Mlp>},
    DeviceKernel{"norm_sequence", ours<primitives::NormSequence>},
    DeviceKernel{"block", ours<primitives::Block>},
    DeviceKernel{"replicated_gradients", ours<primitives::ReplicatedGradients>},
    DeviceKernel{"replicated_router", ours<primitives::ReplicatedRouter>},
    DeviceKernel{"replicated_qk_norm", ours<primitives::ReplicatedQkNorm>},
    DeviceKernel{"replicated_qkv", ours<primitives::ReplicatedQkv>},
    DeviceKernel{"replicated_clip", ours<primitives::ReplicatedClip>},
    DeviceKernel{"replicated_step", ours<primitives::ReplicatedStep>},
    DeviceKernel{"quantised_gather", ours<primitives::QuantisedGather>},
    DeviceKernel{"quantised_linear", ours<primitives::QuantisedLinear>},
    DeviceKernel{"attention_allgather", attention<primitives::Strategy::allgather>},
    DeviceKernel{"attention_ring", attention<primitives::Strategy::ring>},
    DeviceKernel{"attention_alltoall", attention<primitives::Strategy::alltoall>},
    DeviceKernel{"attention_hierarchical", attention<primitives::Strategy::hierarchical>},
    DeviceKernel{"attention_block", made<primitives::blockwise_attention_block>},
    DeviceKernel{"rotary_context", ours<primitives::RotaryContext>},
    DeviceKernel{"loss_packed", ours<primitives::LossPacked>},
    DeviceKernel{"zigzag_exchange", ours<primitives::ZigzagExchange>},
    DeviceKernel{"conv_context", ours<primitives::ConvContext>},
    DeviceKernel{"scan_context", ours<primitives::ScanContext>},
    DeviceKernel{"delta_context", ours<primitives::DeltaContext>},
    DeviceKernel{"mixer_alltoall", ours<primitives::MixerAlltoall>},
    DeviceKernel{"vocab_embedding", ours<primitives::VocabEmbedding>},
    DeviceKernel{"vocab_cross_entropy", ours<primitives::VocabCrossEntropy>},
    DeviceKernel{"vocab_log_softmax", ours<primitives::VocabLogSoftmax>},
    DeviceKernel{"vocab_log_probs", ours<primitives::VocabLogProbs>},
    DeviceKernel{"expert_alltoall", ours<primitives::ExpertAlltoall>},
    DeviceKernel{"expert_balance", ours<primitives::ExpertBalance>},
    DeviceKernel{"expert_mlp", ours<primitives::ExpertMlp>},
    DeviceKernel{"mapping_copy", made<mapping_copy>},
    DeviceKernel{"mapping_reduce", made<mapping_reduce>},
    DeviceKernel{"mapping_scaled_reduce", made<mapping_scaled_reduce>},
    DeviceKernel{"mapping_all_reduce", made<mapping_all_reduce>},
    DeviceKernel{"mapping_scatter", made<mapping_scatter>},
    DeviceKernel{"mapping_gather", made<mapping_gather>},
    DeviceKernel{"mapping_all_gather", made<mapping_all_gather>},
    DeviceKernel{"mapping_reduce_scatter", made<mapping_reduce_scatter>},
    DeviceKernel{"mapping_all_to_all", made<mapping_all_to_all>},
    DeviceKernel{"mapping_slice", made<mapping_slice>},
    DeviceKernel{"mapping_pad", made<mapping_pad>},
    DeviceKernel{"mapping_replicate_to_invariant", made<mapping_replicate_to_invariant>},
    DeviceKernel{"mapping_invariant_to_partial", made<mapping_invariant_to_partial>},
    DeviceKernel{"mapping_replicate_to_partial", made<mapping_replicate_to_partial>},
    DeviceKernel{"mapping_reinterpret", made<mapping_reinterpret>},
    DeviceKernel{"linear_column", in_tf32<primitives::LinearColumn>, "", tf32_subject},
    DeviceKernel{"linear_row", in_tf32<primitives::LinearRow>, "", tf32_subject},
    DeviceKernel{"linear_column", in_tf32<primitives::LinearColumn>, "tf32_undeclared"},
    DeviceKernel{"linear_row", in_tf32<primitives::LinearRow>, "tf32_undeclared"},
    broken<primitives::cuda::event_wait_missing>("mapping_copy", "event_wait_missing"),
    broken<primitives::cuda::input_wait_missing>("mapping_copy", "input_wait_missing"),
    broken<primitives::cuda::refilled_before_read>("mapping_copy", "refilled_before_read"),
    broken<primitives::cuda::tail_unwritten>("mapping_copy", "tail_unwritten"),
    broken<primitives::cuda::dense_read>("mapping_copy", "dense_read"),
    broken<primitives::cuda::offset_in_32_bits>("mapping_copy", "offset_in_32_bits"),
    broken<primitives::cuda::barrier_missing>("norm_sequence", "barrier_missing"),
};

}  // namespace shardproof::cuda
