# The package `shardproof`: headers, static libraries, modules, the program and shardproof_add_gate.
# Nothing of Eigen, MPI, json, CLI11 or CUDA is needed to use it; the libraries link fmt and threads.
# No path of this build or of the prefix is kept in it, so that the prefix may be moved.
include(CMakePackageConfigHelpers)

set(libraries shardproof_subject shardproof_fixtures shardproof_reference shardproof_primitives shardproof_host_executor
    shardproof_oracle shardproof_suites)
foreach(library ${libraries})
  target_include_directories(${library} INTERFACE $<INSTALL_INTERFACE:include/shardproof>)
  target_compile_features(${library} INTERFACE cxx_std_20)
endforeach()
target_include_directories(shardproof_suites INTERFACE
  $<BUILD_INTERFACE:${PROJECT_SOURCE_DIR}/oracle/include> $<INSTALL_INTERFACE:include>)
target_compile_definitions(shardproof_suites INTERFACE
  $<BUILD_INTERFACE:SHARDPROOF_PACKAGE_MODULES="${PROJECT_BINARY_DIR}">)
if(SHARDPROOF_SANITIZE)
  target_link_options(shardproof_suites INTERFACE $<INSTALL_INTERFACE:-fsanitize=${SHARDPROOF_SANITIZE}>)
endif()
set_target_properties(shardproof_suites PROPERTIES EXPORT_NAME shardproof)
add_library(shardproof::shardproof ALIAS shardproof_suites)
include(${CMAKE_CURRENT_LIST_DIR}/shardproofAddGate.cmake)  # for projects that hold this one

# The closure of subject.hpp, and what a contract from outside states its operands and ranges with.
foreach(header fixtures/dtype fixtures/tensor fixtures/placement fixtures/fills fixtures/index_maps
        fixtures/sharding fixtures/regressions oracle/case oracle/subject oracle/contract oracle/registry
        oracle/comm/door oracle/comm/communicator)
  cmake_path(GET header PARENT_PATH folder)
  install(FILES ${header}.hpp DESTINATION include/shardproof/${folder})
endforeach()
install(FILES oracle/include/shardproof/subject.hpp oracle/digest/shardproof_digest.h DESTINATION include/shardproof)

install(TARGETS shardproof RUNTIME DESTINATION bin)
foreach(module shardproof_mpi shardproof_cuda)
  if(TARGET ${module})
    install(TARGETS ${module} LIBRARY DESTINATION lib/shardproof)
  endif()
endforeach()
install(TARGETS ${libraries} EXPORT shardproof ARCHIVE DESTINATION lib)
install(EXPORT shardproof NAMESPACE shardproof:: FILE shardproofTargets.cmake DESTINATION lib/cmake/shardproof)
configure_package_config_file(${CMAKE_CURRENT_LIST_DIR}/shardproofConfig.cmake.in
  ${PROJECT_BINARY_DIR}/shardproofConfig.cmake INSTALL_DESTINATION lib/cmake/shardproof)
write_basic_package_version_file(${PROJECT_BINARY_DIR}/shardproofConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/shardproofConfig.cmake ${PROJECT_BINARY_DIR}/shardproofConfigVersion.cmake
  ${CMAKE_CURRENT_LIST_DIR}/shardproofAddGate.cmake DESTINATION lib/cmake/shardproof)
