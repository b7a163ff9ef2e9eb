// Which transport a world runs on.
#include "oracle/comm/world.hpp"

#include <fmt/format.h>

#include "oracle/case.hpp"
#include "oracle/comm/mpi.hpp"
#include "oracle/comm/mpi_protocol.hpp"
#include "oracle/comm/nccl_door.hpp"
#include "oracle/comm/transport_self_test.hpp"
#include "oracle/comm/transports.hpp"

namespace shardproof {

int most_ranks(const std::string& transport) {
  const bool known = transport == "processes" || transport == "threads" || transport == "mpi" ||
                     transport == "nccl";
  return known ? 64 : 0;
}

std::unique_ptr<World> start_world(const WorldSpec& spec, RankMain main) {
  const int most = most_ranks(spec.transport);
  if (most == 0) {
    throw BadInput(
        fmt::format("transport={}: expected processes, threads, mpi or nccl", spec.transport));
  }
  if (spec.ranks < 1 || spec.ranks > most) {
    throw BadInput(fmt::format("transport={}: expected 1 to {} ranks, met {}; take smaller axes",
                               spec.transport, most, spec.ranks));
  }
  if (spec.in_process && spec.transport != "threads") {
    throw BadInput(fmt::format("in-process ranks are threads: expected transport=threads, met {}",
                               spec.transport));
  }
  main = with_self_test(std::move(main));
  if (spec.transport == "nccl") {
    main = with_nccl(std::move(main), spec.deadline_scale);
    return outside_launch() ? start_outside_world(spec, std::move(main))
                            : start_processes(spec, main);
  }
  if (spec.transport == "processes") return start_processes(spec, main);
  if (spec.transport == "threads") return start_threads(spec, main);
  return start_mpi_world(spec, std::move(main));
}

}  // namespace shardproof
