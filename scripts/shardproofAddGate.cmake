# shardproof_add_gate(TARGET [RANKS 1 2 3 4 8] [TRANSPORTS processes mpi] [TIER ci] [OPTIONS ...])
#
# ctest entries gate.TARGET.TRANSPORT.npN: `TARGET gate` on one transport and rank count. TARGET is an
# executable whose main hands a registry to shardproof::main; its own subjects are judged, and the
# options may narrow that (--subject NAME, a contract).
#
#   labels       gate TARGET TRANSPORT npN
#   processors   one a rank; MPI entries run alone, since their waits poll
#   skipped      a transport that the build or the machine lacks, with the reason in its output
#   timeout      600 s for each entry
function(shardproof_add_gate target)
  cmake_parse_arguments(PARSE_ARGV 1 gate "" "TIER" "RANKS;TRANSPORTS;OPTIONS")
  if(NOT TARGET ${target})
    message(FATAL_ERROR "shardproof_add_gate: expected an executable target, met '${target}'; "
                        "call it after add_executable(${target} ...)")
  endif()
  if(gate_UNPARSED_ARGUMENTS)
    message(FATAL_ERROR "shardproof_add_gate(${target}): expected RANKS, TRANSPORTS, TIER or OPTIONS, "
                        "met '${gate_UNPARSED_ARGUMENTS}'")
  endif()
  if(NOT gate_RANKS)
    set(gate_RANKS 1 2 3 4 8)
  endif()
  if(NOT gate_TRANSPORTS)
    set(gate_TRANSPORTS processes)
  endif()
  if(NOT gate_TIER)
    set(gate_TIER ci)
  endif()
  foreach(transport ${gate_TRANSPORTS})
    foreach(ranks ${gate_RANKS})
      set(name gate.${target}.${transport}.np${ranks})
      add_test(NAME ${name} COMMAND ${target} gate ${gate_OPTIONS} --tier ${gate_TIER}
               --transport ${transport} --ranks ${ranks} --skip-code 77)
      set_tests_properties(${name} PROPERTIES LABELS "gate;${target};${transport};np${ranks}"
                           PROCESSORS ${ranks} TIMEOUT 600 SKIP_RETURN_CODE 77)
      if(transport STREQUAL "mpi")
        set_tests_properties(${name} PROPERTIES RUN_SERIAL TRUE)
      endif()
    endforeach()
  endforeach()
endfunction()
