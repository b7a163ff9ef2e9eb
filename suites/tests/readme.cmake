# The README's table is what `shardproof list --table` prints. Run as
#   cmake -DPROGRAM=... -DREADME=... -P readme.cmake
execute_process(COMMAND ${PROGRAM} list --table OUTPUT_VARIABLE table RESULT_VARIABLE code)
file(READ ${README} readme)
string(FIND "${readme}" "${table}" at)
if(NOT code EQUAL 0 OR at EQUAL -1)
  message(FATAL_ERROR "README.md does not hold what `${PROGRAM} list --table` prints; paste it there:\n${table}")
endif()
