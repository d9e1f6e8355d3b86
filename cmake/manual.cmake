# Man pages and completions of the programs, in ${manual} as /usr/share has them. Each is made of
# the program's --help whenever that is linked.
find_package(Python3 REQUIRED COMPONENTS Interpreter)
set(manual ${PROJECT_BINARY_DIR}/packaging/share)
file(GLOB manual_sources CONFIGURE_DEPENDS ${PROJECT_SOURCE_DIR}/scripts/manual/*.py)

function(add_manual program section)
  if(SPILLWAY_SANITIZE)
    return()
  endif()
  set_property(TARGET ${program} APPEND PROPERTY LINK_DEPENDS ${manual_sources})
  add_custom_command(
    TARGET ${program} POST_BUILD
    COMMAND Python3::Interpreter -B ${PROJECT_SOURCE_DIR}/scripts/manual --version
            ${PROJECT_VERSION} --section ${section} --output ${manual} $<TARGET_FILE:${program}>
    VERBATIM)
endfunction()
