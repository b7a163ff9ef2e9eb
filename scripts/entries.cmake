# How entries of ctest share a machine. PROCESSORS says how many an entry keeps busy, and ctest has no number between
# none and one for what sleeps most of its time, until a deadline has passed or another program ends. So it is told
# halves: twice what is written where an entry is added, and one for an entry that waits. scripts/test gives it two for
# each processor and one more, in which those that wait run one after the other.

# shardproof_entry_waits(ENTRY ...): the longest first, since the others have no other place either.
function(shardproof_entry_waits)
  set_tests_properties(${ARGN} PROPERTIES RESOURCE_LOCK waits COST 100)
endfunction()

# Of the folder that is being read, once all its entries are added.
function(shardproof_entries_in_halves)
  get_property(entries DIRECTORY PROPERTY TESTS)
  foreach(entry ${entries})
    get_property(lock TEST ${entry} PROPERTY RESOURCE_LOCK)
    get_property(busy TEST ${entry} PROPERTY PROCESSORS)
    set(halves 1)
    if(NOT lock STREQUAL "waits")
      if(NOT busy)
        set(busy 1)
      endif()
      math(EXPR halves "2 * ${busy}")
    endif()
    set_tests_properties(${entry} PROPERTIES PROCESSORS ${halves})
  endforeach()
endfunction()
