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

configure_package_config_file(cmake/pulseinfer-config.cmake.in pulseinfer-config.cmake
  INSTALL_DESTINATION "${package_dir}" NO_SET_AND_CHECK_MACRO)
# Before 1.0 a minor version may break its callers.
write_basic_package_version_file(pulseinfer-config-version.cmake
  COMPATIBILITY SameMinorVersion ARCH_INDEPENDENT)
install(FILES "${PROJECT_BINARY_DIR}/pulseinfer-config.cmake"
  "${PROJECT_BINARY_DIR}/pulseinfer-config-version.cmake" DESTINATION "${package_dir}")
