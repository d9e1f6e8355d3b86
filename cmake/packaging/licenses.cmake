# Run while a package is put together: the licences of what it carries, as
# Debian's packages state them. `carried`: folders with libraries; `folder`:
# where the licences go; both below the package's root.
set(root "$ENV{DESTDIR}${CMAKE_INSTALL_PREFIX}")

# Headers that are compiled in.
set(packages libboost1.74-dev libcli11-dev libtoml11-dev libxxhash-dev nlohmann-json3-dev)
set(patterns "")
foreach(libraries IN LISTS carried)
  file(GLOB names RELATIVE "${root}/${libraries}" "${root}/${libraries}/*.so*")
  list(FILTER names EXCLUDE REGEX "^libspillway")
  list(TRANSFORM names PREPEND "*/")
  list(APPEND patterns ${names})
endforeach()
if(patterns)
  execute_process(COMMAND dpkg-query --search ${patterns} OUTPUT_VARIABLE found
                  COMMAND_ERROR_IS_FATAL ANY)
  string(REGEX MATCHALL "[^\n]+" lines "${found}")
  foreach(line IN LISTS lines)
    string(REGEX REPLACE "[:,].*" "" package "${line}")
    list(APPEND packages ${package})
  endforeach()
  list(REMOVE_DUPLICATES packages)
endif()

file(MAKE_DIRECTORY "${root}/${folder}")
foreach(package IN LISTS packages)
  configure_file("/usr/share/doc/${package}/copyright" "${root}/${folder}/${package}" COPYONLY)
endforeach()
