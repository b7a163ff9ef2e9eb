# The module of devices: shardproof_cuda.so, loaded by ranks that were asked for device=cuda. The
# only target that sees CUDA, cuBLAS and NCCL. CUDA is optional: cuda_summary says what became of it.
set(cuda_summary "no (SHARDPROOF_CUDA=OFF)")

# What the toolkit compiles for where nothing is said: one front end for 8.0, 9.0 and the PTX that later devices
# compile, since a second one takes a quarter of the time and nothing here differs between them. 7.0 left the
# toolkit with CUDA 13.
set(SHARDPROOF_CUDA_ARCHITECTURES "" CACHE STRING "CUDA architectures, such as 90; empty: sm_80, sm_90 and PTX")
function(shardproof_cuda_architectures target summary)
  if(SHARDPROOF_CUDA_ARCHITECTURES)
    set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES "${SHARDPROOF_CUDA_ARCHITECTURES}")
    set(${summary} "architectures ${SHARDPROOF_CUDA_ARCHITECTURES}" PARENT_SCOPE)
    return()
  endif()
  set(codes "arch=compute_80,code=[sm_80,sm_90,compute_80]")
  set(${summary} "sm_80, sm_90, PTX" PARENT_SCOPE)
  if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 13)
    list(APPEND codes "arch=compute_70,code=sm_70")
    set(${summary} "sm_70, sm_80, sm_90, PTX" PARENT_SCOPE)
  endif()
  set_target_properties(${target} PROPERTIES CUDA_ARCHITECTURES OFF)
  list(TRANSFORM codes PREPEND "--generate-code=")
  target_compile_options(${target} PRIVATE "$<$<COMPILE_LANGUAGE:CUDA>:${codes}>")
endfunction()

macro(shardproof_cuda_absent reason)
  set(cuda_summary "no (${reason})")
  if(SHARDPROOF_CUDA STREQUAL "ON")
    message(FATAL_ERROR "SHARDPROOF_CUDA=ON but ${reason}: install the CUDA Toolkit with cuBLAS and NCCL, "
                        "or set CMAKE_CUDA_COMPILER and CMAKE_PREFIX_PATH")
  endif()
endmacro()

if(NOT SHARDPROOF_CUDA STREQUAL "OFF")
  include(CheckLanguage)
  # Where NVIDIA's installer puts it, which is seldom on PATH. An nvcc that does not work with the
  # host's compiler counts as none: check_language tries it.
  find_program(nvcc nvcc HINTS /usr/local/cuda/bin NO_CACHE)
  if(nvcc AND NOT DEFINED ENV{CUDACXX})
    set(ENV{CUDACXX} ${nvcc})
  endif()
  check_language(CUDA)
  find_package(CUDAToolkit QUIET)
  # Where the toolkit's libraries are, FindCUDAToolkit says otherwise in each of its versions; NCCL is no part of
  # it, and a package of Python has it under the name of its interface alone.
  set(libraries ${CUDAToolkit_LIBRARY_DIR} ${CUDAToolkit_LIBRARY_SEARCH_DIRS})
  if(TARGET CUDA::cublas)
    get_target_property(cublas CUDA::cublas IMPORTED_LOCATION)
    cmake_path(GET cublas PARENT_PATH cublas)
    list(APPEND libraries ${cublas})
  endif()
  find_path(NCCL_INCLUDE nccl.h HINTS ${CUDAToolkit_INCLUDE_DIRS})
  find_library(NCCL_LIBRARY NAMES nccl libnccl.so.2 HINTS ${libraries})
  if(NOT CMAKE_CUDA_COMPILER)
    shardproof_cuda_absent("no nvcc that works was found")
  elseif(NOT CUDAToolkit_FOUND OR CUDAToolkit_VERSION VERSION_LESS 12.4)
    shardproof_cuda_absent("no CUDA Toolkit of 12.4 or later was found")
  elseif(NOT TARGET CUDA::cublas)
    shardproof_cuda_absent("no cuBLAS was found")
  elseif(NOT NCCL_INCLUDE OR NOT NCCL_LIBRARY)
    shardproof_cuda_absent("no NCCL was found")
  else()
    enable_language(CUDA)
    file(GLOB sources CONFIGURE_DEPENDS primitives/cuda/*.cpp)
    file(GLOB kernels CONFIGURE_DEPENDS primitives/cuda/*.cu oracle/cuda/*.cu)
    # CUB's headers are most of what a small file costs, for which nvcc parses them twice.
    shardproof_units(kernels kernels
      UNIT primitives/cuda/attention_key_gradient primitives/cuda/eight_bits primitives/cuda/optimizer
           primitives/cuda/rotary_pairs
      UNIT primitives/cuda/attention_query_gradient primitives/cuda/clip primitives/cuda/expert_rows
           primitives/cuda/pointwise primitives/cuda/twins
      UNIT primitives/cuda/attention_value_gradient primitives/cuda/gate primitives/cuda/norm_rows
           primitives/cuda/token_loss primitives/cuda/vocab_shard
      UNIT oracle/cuda/digest oracle/cuda/divide oracle/cuda/spin oracle/cuda/word_sum)
    add_library(shardproof_cuda MODULE oracle/cuda/module.cpp ${sources} ${kernels})
    shardproof_cuda_architectures(shardproof_cuda architectures)
    set_target_properties(shardproof_cuda PROPERTIES PREFIX ""
      CUDA_STANDARD 17 CUDA_STANDARD_REQUIRED ON CUDA_EXTENSIONS OFF CUDA_RUNTIME_LIBRARY Shared
      INSTALL_RPATH_USE_LINK_PATH ON LIBRARY_OUTPUT_DIRECTORY ${CMAKE_CURRENT_BINARY_DIR})
    target_include_directories(shardproof_cuda SYSTEM PRIVATE ${NCCL_INCLUDE})
    # Linked whether or not anything calls them yet: what a rank loads is what later kernels use.
    target_compile_options(shardproof_cuda PRIVATE
      "$<$<COMPILE_LANGUAGE:CUDA>:--fmad=false;-Xcompiler=-Wall,-Wextra>")
    target_link_libraries(shardproof_cuda PRIVATE shardproof_primitives CUDA::cudart CUDA::cublas
                          ${NCCL_LIBRARY})
    set(cuda_summary "yes (${CMAKE_CUDA_COMPILER_VERSION}, ${architectures})")
  endif()
endif()
message(STATUS "CUDA module: ${cuda_summary}")

# The headers of CCCL, for what runs on its host system in tests: in a folder of their own from CUDA 13 on.
find_path(CCCL_INCLUDE thrust/reduce.h HINTS ${CUDAToolkit_INCLUDE_DIRS} /usr/local/cuda/include PATH_SUFFIXES cccl)

# Devices that are none, for the tests of everything above them: each found in its own folder only. Kernels
# are done by loops or, in device_double_grid, by themselves (suites/self/cuda_on_host).
file(GLOB sources CONFIGURE_DEPENDS suites/self/device_double/*.cpp)
list(FILTER sources EXCLUDE REGEX "/by_[a-z]*\\.cpp$")
add_library(device_double_parts OBJECT EXCLUDE_FROM_ALL ${sources} primitives/cuda/gemm.cpp
            primitives/cuda/twins.cpp)
target_link_libraries(device_double_parts PRIVATE shardproof_primitives)
function(shardproof_device_double name work)
  add_library(${name} MODULE EXCLUDE_FROM_ALL ${PROJECT_SOURCE_DIR}/suites/self/device_double/${work}.cpp)
  set_target_properties(${name} PROPERTIES PREFIX "" OUTPUT_NAME shardproof_cuda
    LIBRARY_OUTPUT_DIRECTORY ${PROJECT_BINARY_DIR}/${name})
  target_link_libraries(${name} PRIVATE device_double_parts shardproof_primitives)
endfunction()
shardproof_device_double(device_double by_loops)
shardproof_talks(${PROJECT_SOURCE_DIR}/suites/self/device_double/by_loops.cpp)  # extents are small
# A module of devices holds the primitives and nothing of the judge: what else it would need shows here, and not
# where a rank loads it.
if(NOT SHARDPROOF_SANITIZE)
  foreach(module device_double shardproof_cuda)
    if(TARGET ${module})
      target_link_options(${module} PRIVATE -Wl,--no-undefined)
    endif()
  endforeach()
endif()
