# Packages of the daemon, the tool and libspillway, made by `make package`: a Debian package that
# uses the distribution's libraries, another of what builds against libspillway, and an archive that carries
# its own and runs from whatever folder it is unpacked in.
if(SPILLWAY_SANITIZE OR NOT TARGET spillwayd OR NOT TARGET spillway)
  return()
endif()

include(CMakePackageConfigHelpers)
set(packaging ${PROJECT_SOURCE_DIR}/cmake/packaging)
set(made ${PROJECT_BINARY_DIR}/packaging)
set(programs spillwayd spillway)
set(library spillway_c)
set(portable COMPONENT portable EXCLUDE_FROM_ALL)
set(debian COMPONENT debian EXCLUDE_FROM_ALL)
set(devices "CPU")
if(SPILLWAY_HAS_CUDA)
  set(devices "CPU, CUDA")
else()
  message(STATUS "Packages of this build are without the CUDA device")
endif()

# What builds against libspillway: the API's messages, and files for CMake and pkg-config, which find
# the rest from where they lie.
function(install_development component lib prefix prefix_from_lib)
  set(folder ${made}/${component})
  configure_file(${packaging}/spillway-config.cmake.in ${folder}/spillway-config.cmake @ONLY)
  configure_file(${packaging}/spillway.pc.in ${folder}/spillway.pc @ONLY)
  write_basic_package_version_file(${folder}/spillway-config-version.cmake
                                   COMPATIBILITY SameMinorVersion)
  set(options COMPONENT ${component} EXCLUDE_FROM_ALL)
  install(FILES ${folder}/spillway-config.cmake ${folder}/spillway-config-version.cmake
          DESTINATION ${lib}/cmake/spillway ${options})
  install(FILES ${folder}/spillway.pc DESTINATION ${lib}/pkgconfig ${options})
  install(DIRECTORY ${PROJECT_SOURCE_DIR}/proto/spillway ${PROJECT_SOURCE_DIR}/proto/google
          DESTINATION ${prefix}share/spillway/proto ${options} FILES_MATCHING PATTERN "*.proto")
endfunction()

# Where the programs look for libraries. An old-style rpath rather than a
# runpath, for it holds for the libraries of libraries too, so that the carried
# ones stay as the distribution made them. The C++ runtime is the one that an
# old copy breaks (plugins of the system may need a newer one) and a new copy
# too (Debian 12's needs glibc 2.36, all else 2.34): the system's comes first,
# and lib/fallback has it for systems without any.
set(arch ${CMAKE_LIBRARY_ARCHITECTURE})
foreach(target IN ITEMS ${programs} ${library})
  set(lib "$ORIGIN/../lib")
  if(target STREQUAL ${library})
    set(lib "$ORIGIN")
  endif()
  set(rpath "${lib}:/lib/${arch}:/usr/lib/${arch}:/lib64:/usr/lib64:${lib}/fallback")
  set_target_properties(${target} PROPERTIES INSTALL_RPATH "${rpath}" BUILD_WITH_INSTALL_RPATH ON)
  target_link_options(${target} PRIVATE LINKER:--disable-new-dtags)
endforeach()

# The archive. libcuda is the driver's, and the CUDA runtime opens it by name.
set(runtime "lib(stdc\\+\\+|gcc_s)\\.so")
set(glibc "^(ld-linux|lib(c|m|dl|rt|pthread|resolv|util|anl|mvec)\\.so)")
install(TARGETS ${programs} ${library} RUNTIME_DEPENDENCY_SET spillway_libraries
        RUNTIME DESTINATION bin ${portable}
        LIBRARY DESTINATION lib ${portable}
        PUBLIC_HEADER DESTINATION include ${portable})
install_development(portable lib "" "..")
install(RUNTIME_DEPENDENCY_SET spillway_libraries
        PRE_EXCLUDE_REGEXES ${glibc} ${runtime}
        LIBRARY DESTINATION lib ${portable})
install(RUNTIME_DEPENDENCY_SET spillway_libraries
        PRE_EXCLUDE_REGEXES ${glibc}
        POST_INCLUDE_REGEXES ${runtime}
        POST_EXCLUDE_REGEXES "."
        LIBRARY DESTINATION lib/fallback ${portable})
set(listen "# listen = \"unix:/run/user/1000/spillway/spillwayd.sock\"")
set(socket_group "# socket_group = \"\"")
configure_file(${packaging}/spillwayd.toml.in ${made}/portable/spillwayd.toml @ONLY)
configure_file(${packaging}/README.in ${made}/portable/README @ONLY)
# Units name programs by their whole path: of an archive that was unpacked to /opt/spillway.
set(config /opt/spillway/etc/spillwayd.toml)
set(command "/opt/spillway/bin/spillwayd --config ${config} --listen unix:/run/spillway/spillwayd.sock --socket-group spillway")
configure_file(${packaging}/spillwayd.service.in ${made}/portable/spillwayd.service @ONLY)
install(FILES ${made}/portable/spillwayd.toml ${made}/portable/spillwayd.service
        DESTINATION etc ${portable})
install(FILES ${made}/portable/README LICENSE DESTINATION share/doc/spillway ${portable})
install(DIRECTORY ${manual}/ DESTINATION share ${portable})
install(CODE "set(folder share/doc/spillway/licenses)\nset(carried lib lib/fallback)" ${portable})
install(SCRIPT ${packaging}/licenses.cmake ${portable})

# The Debian package. Its programs find libraries as all of the distribution's
# do.
install(TARGETS ${programs} ${library}
        RUNTIME DESTINATION usr/bin ${debian}
        LIBRARY DESTINATION usr/lib/${arch} NAMELINK_COMPONENT development ${debian}
        PUBLIC_HEADER DESTINATION usr/include COMPONENT development EXCLUDE_FROM_ALL)
install_development(development usr/lib/${arch} usr/ "../..")
foreach(target IN ITEMS ${programs} ${library})
  set(folder bin)
  if(target STREQUAL ${library})
    set(folder lib/${arch})
  endif()
  install(CODE "file(RPATH_REMOVE FILE \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/usr/${folder}/$<TARGET_FILE_NAME:${target}>\")"
          ${debian})
endforeach()
set(listen "listen = \"unix:/run/spillway/spillwayd.sock\"")
set(socket_group "socket_group = \"spillway\"")
configure_file(${packaging}/spillwayd.toml.in ${made}/debian/spillwayd.toml @ONLY)
install(FILES ${made}/debian/spillwayd.toml DESTINATION etc/spillway ${debian})
set(config /etc/spillway/spillwayd.toml)
set(command "/usr/bin/spillwayd --config ${config}")
configure_file(${packaging}/spillwayd.service.in ${made}/debian/spillwayd.service @ONLY)
install(FILES ${made}/debian/spillwayd.service DESTINATION lib/systemd/system ${debian})
install(FILES LICENSE ${packaging}/debian/copyright DESTINATION usr/share/doc/spillway ${debian})
install(DIRECTORY ${manual}/man ${manual}/bash-completion DESTINATION usr/share ${debian})
# Where Debian's zsh looks.
install(DIRECTORY ${manual}/zsh/site-functions/ DESTINATION usr/share/zsh/vendor-completions
        ${debian})
install(FILES ${packaging}/debian/copyright DESTINATION usr/share/doc/spillway-dev
        COMPONENT development EXCLUDE_FROM_ALL)
install(CODE "set(folder usr/share/doc/spillway/licenses)\nset(carried \"\")" ${debian})
install(SCRIPT ${packaging}/licenses.cmake ${debian})

# CPack asks for the target preinstall, which is not to build tests.
set(CMAKE_SKIP_INSTALL_ALL_DEPENDENCY ON)
set(CPACK_VERBATIM_VARIABLES ON)
set(CPACK_GENERATOR DEB TGZ)
set(CPACK_SOURCE_GENERATOR "")
set(CPACK_PACKAGE_NAME spillway)
set(CPACK_PACKAGE_VENDOR "Spillway")
set(CPACK_PACKAGE_CONTACT "Spillway maintainers <maintainers@spillway.invalid>")
set(CPACK_PACKAGE_DESCRIPTION_SUMMARY "attention over K/V caches that are larger than the device")
set(CPACK_PACKAGE_DESCRIPTION
    "A daemon that keeps K/V caches in host memory, attends to the tokens that
matter and certifies the error, the tool that watches it, and the library that
other languages decode with.
Devices of this build: ${devices}.")
set(CPACK_STRIP_FILES ON)
set(CPACK_COMPONENTS_GROUPING ALL_COMPONENTS_IN_ONE)
set(CPACK_PROJECT_CONFIG_FILE ${packaging}/generators.cmake)

set(CPACK_ARCHIVE_COMPONENT_INSTALL ON)
set(CPACK_ARCHIVE_FILE_NAME spillway-${PROJECT_VERSION}-linux-${CMAKE_SYSTEM_PROCESSOR})

set(CPACK_DEB_COMPONENT_INSTALL ON)
set(CPACK_DEBIAN_FILE_NAME DEB-DEFAULT)
set(CPACK_DEBIAN_PACKAGE_SECTION science)
set(CPACK_DEBIAN_PACKAGE_SHLIBDEPS ON)
set(CPACK_DEBIAN_DEBIAN_PACKAGE_NAME spillway)
set(CPACK_DEBIAN_DEBIAN_PACKAGE_DEPENDS adduser)
if(SPILLWAY_HAS_CUDA)
  set(CPACK_DEBIAN_DEBIAN_PACKAGE_SUGGESTS libcuda1)
endif()
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_NAME spillway-dev)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SECTION libdevel)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_SHLIBDEPS OFF)
set(CPACK_DEBIAN_DEVELOPMENT_PACKAGE_DEPENDS "spillway (= ${PROJECT_VERSION})")
set(CPACK_COMPONENT_DEVELOPMENT_DESCRIPTION
    "header, messages, and files for CMake and pkg-config of libspillway")
set(CPACK_DEBIAN_DEBIAN_PACKAGE_CONTROL_EXTRA
    ${packaging}/debian/conffiles ${packaging}/debian/postinst ${packaging}/debian/prerm
    ${packaging}/debian/postrm ${packaging}/debian/triggers)
set(CPACK_DEBIAN_PACKAGE_CONTROL_STRICT_PERMISSION ON)
include(CPack)
