# SPDX-License-Identifier: Apache-2.0
# Headers, exported target and package files: what find_package(pulseinfer) needs. Nothing in them
# depends on the machine or on the prefix.
include(CMakePackageConfigHelpers)
include(GNUInstallDirs)

set(package_dir "${CMAKE_INSTALL_DATADIR}/cmake/pulseinfer")
install(DIRECTORY "${PROJECT_SOURCE_DIR}/include/pulseinfer" DESTINATION include
  FILES_MATCHING PATTERN "*.hpp" PATTERN "*.cuh")
install(TARGETS pulseinfer EXPORT pulseinfer-targets)
install(EXPORT pulseinfer-targets NAMESPACE pulseinfer:: DESTINATION "${package_dir}")
# In an export set too, so that an engine that vendors the library can export what links it.
if(TARGET pulseinfer_cuda)
  set_target_properties(pulseinfer_cuda PROPERTIES EXPORT_NAME cuda)
  install(TARGETS pulseinfer_cuda EXPORT pulseinfer-cuda-targets)
  install(EXPORT pulseinfer-cuda-targets NAMESPACE pulseinfer:: DESTINATION "${package_dir}")
endif()

configure_package_config_file(cmake/pulseinfer-config.cmake.in pulseinfer-config.cmake
  INSTALL_DESTINATION "${package_dir}" NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break its callers.
write_basic_package_version_file(pulseinfer-config-version.cmake
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/pulseinfer-config.cmake"
  "${PROJECT_BINARY_DIR}/pulseinfer-config-version.cmake" DESTINATION "${package_dir}")

# For builds without CMake; nvcc takes the same flags. The standard is the engine's to choose.
set(pkgconfig_dir "${CMAKE_INSTALL_DATADIR}/pkgconfig")
file(RELATIVE_PATH up "/prefix/${pkgconfig_dir}" "/prefix")
string(REGEX REPLACE "/$" "" up "${up}")
configure_file(cmake/pulseinfer.pc.in pulseinfer.pc @ONLY)
install(FILES "${PROJECT_BINARY_DIR}/pulseinfer.pc" DESTINATION "${pkgconfig_dir}")
