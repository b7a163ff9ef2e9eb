# Judge and judged share no code: contracts name kernels of primitives/ and their refusals, planted
# faults not even these, and neither oracle/, reference/ nor fixtures/ anything of them, but for the
# module of devices, which hands the kernels out, and the note of a launch (noted.hpp).
#   cmake -DSOURCE=... -P apart.cmake
set(found "")

# Lines of the files that match `what`, but for what `allowed` matches in them.
function(forbid what allowed)
  foreach(file ${ARGN})
    file(STRINGS ${file} lines REGEX "${what}")
    foreach(line IN LISTS lines)
      string(REGEX REPLACE "${allowed}" "" rest "${line}")
      if(rest MATCHES "${what}")
        string(APPEND found "${file}: ${line}\n")
      endif()
    endforeach()
  endforeach()
  set(found "${found}" PARENT_SCOPE)
endfunction()

file(GLOB contracts ${SOURCE}/suites/*.cpp ${SOURCE}/suites/*.hpp)
file(GLOB planted ${SOURCE}/suites/self/plain.* ${SOURCE}/suites/self/planted*.cpp ${SOURCE}/suites/self/planted.hpp)
file(GLOB_RECURSE judge ${SOURCE}/oracle/*.cpp ${SOURCE}/oracle/*.hpp ${SOURCE}/oracle/*.cu ${SOURCE}/oracle/*.cuh
     ${SOURCE}/reference/*.cpp ${SOURCE}/reference/*.hpp ${SOURCE}/fixtures/*.cpp ${SOURCE}/fixtures/*.hpp)
forbid("primitives::[a-z_]" "primitives::refused_[a-z_]*" ${contracts})
list(FILTER judge EXCLUDE REGEX "oracle/cuda/module\\.cpp$")
forbid("primitives(::|/)" "//.*|primitives(::|/)cuda(::|/)noted" ${planted} ${judge})
list(LENGTH judge n)
if(found OR n LESS 50)
  message(FATAL_ERROR "expected judge and judged apart, met in ${n} files and the contracts:\n${found}")
endif()
