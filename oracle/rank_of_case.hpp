// A rank as a kernel sees it: its place in the line's mesh, communicators by axis over one door,
// and workspace that lives until it is cleared.
#pragma once
#include <map>
#include <memory>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "oracle/comm/world.hpp"
#include "oracle/contract.hpp"
#include "oracle/cuda/placed.hpp"

namespace shardproof {

class RankOfCase : public Rank {
 public:
  RankOfCase(const Case& line, const Contract& contract, RankState& state, Door& door,
             const DeviceContext* device)
      : line_(line),
        contract_(contract),
        mesh_(line.mesh()),
        state_(state),
        door_(door),
        device_(device) {
    state_.mesh = &mesh_;
  }
  const Case& line() const override { return line_; }
  int world_rank() const override { return state_.rank; }
  int world_size() const override { return state_.size; }
  const Mesh& mesh() const override { return mesh_; }
  Stream stream() const override { return device_ ? device_->stream() : nullptr; }
  Stream side_stream(int number) const override {
    if (number < 1 || number > side_streams)
      throw std::out_of_range("side_stream: expected a number from 1 to " +
                              std::to_string(side_streams) + ", met " + std::to_string(number));
    return device_ ? device_->numbered(number) : nullptr;
  }
  Communicator& along(Axis a) override { return along(std::vector<Axis>{a}); }
  Communicator& along(const std::vector<Axis>& axes) override {
    return communicator(mesh_.group(axes, state_.rank), mesh_.label(axes));
  }
  Communicator& world() override {
    std::vector<int> all(size_t(state_.size));
    for (int r = 0; r < state_.size; ++r) all[size_t(r)] = r;
    return communicator(std::move(all), "world");
  }
  bool accumulates() const override { return accumulating; }
  bool ends_step() const override { return ending; }
  bool accumulating = false, ending = true;
  View workspace(DType dtype, std::vector<int64_t> shape) override {
    workspaces_.push_back(std::make_unique<Placed>(Buffer(dtype, std::move(shape)), device_));
    workspaces_.back()->send();
    return workspaces_.back()->view();
  }
  void require_legal() const override {
    if (!contract_.precondition) return;
    if (auto refused = contract_.precondition(line_)) throw *refused;
  }
  std::vector<std::unique_ptr<Placed>>& workspaces() { return workspaces_; }

 private:
  Communicator& communicator(std::vector<int> members, const std::string& label) {
    auto& c = communicators_[label];
    if (!c) {
      Group g;
      for (size_t i = 0; i < members.size(); ++i)
        if (members[i] == state_.rank) g.me = int(i);
      g.id = group_id(members);
      g.members = std::move(members);
      g.label = label;
      c = std::make_unique<Communicator>(std::move(g), door_, stream());
    }
    return *c;
  }
  const Case& line_;
  const Contract& contract_;
  Mesh mesh_;
  RankState& state_;
  Door& door_;
  const DeviceContext* device_;
  std::map<std::string, std::unique_ptr<Communicator>> communicators_;
  std::vector<std::unique_ptr<Placed>> workspaces_;
};

}  // namespace shardproof
