# Chooses nvcc before enable_language(CUDA): what the caller names, else the compiler of the Python
# package index (nvidia-cuda-nvcc, a build requirement), else the system's.
if(NOT DEFINED CMAKE_CUDA_COMPILER AND NOT DEFINED ENV{CUDACXX})
  foreach(prefix IN LISTS CMAKE_PREFIX_PATH)
    set(nvcc "${prefix}/nvidia/cu13/bin/nvcc")
    if(NOT EXISTS "${nvcc}")
      continue()
    endif()
    execute_process(COMMAND "${nvcc}" --version OUTPUT_VARIABLE text ERROR_QUIET)
    # An active environment's packages may come first: take the pinned release only. PTX of newer
    # toolkits does not load on 580 drivers.
    if(text MATCHES "release 13\\.0")
      set(CMAKE_CUDA_COMPILER "${nvcc}")
      # The packages ship lib/ where nvcc looks in lib64/.
      string(APPEND CMAKE_CUDA_FLAGS_INIT " \"-L${prefix}/nvidia/cu13/lib\"")
      break()
    endif()
    message(STATUS "kdtree: passing over ${nvcc}: not release 13.0")
  endforeach()
endif()

# KDTREE_CUDA_ARCH: compute capabilities without the dot, e.g. 120 or "90;120"; 120-virtual is PTX,
# which drivers compile for what comes after 12.0. "release" is what the published wheels hold: of
# each family its first member (8.6 runs 8.0's code, 10.3 runs 10.0's, 12.1 runs 12.0's), 8.9 for its
# fp8 conversions, and the PTX of the newest.
set(KDTREE_RELEASE_ARCH "80;89;90;100;120;120-virtual")
set(KDTREE_CUDA_ARCH "90;120" CACHE STRING "GPU architectures to compile for")
if(KDTREE_CUDA_ARCH STREQUAL "release")
  set(kdtree_archs "${KDTREE_RELEASE_ARCH}")
else()
  string(REPLACE "," ";" kdtree_archs "${KDTREE_CUDA_ARCH}")
endif()
set(CMAKE_CUDA_ARCHITECTURES "")
foreach(arch IN LISTS kdtree_archs)
  if(NOT arch MATCHES "^[0-9]+[af]?(-virtual)?$")
    message(FATAL_ERROR "KDTREE_CUDA_ARCH: expected e.g. 120, 90;120 or 120;120-virtual, got '${KDTREE_CUDA_ARCH}'")
  endif()
  if(NOT arch MATCHES "-virtual$")
    # sm_90's wgmma and setmaxnreg exist only in its "a" target; nothing else runs 9.0 code.
    string(REGEX REPLACE "^90$" "90a" arch "${arch}")
    string(APPEND arch "-real")
  endif()
  list(APPEND CMAKE_CUDA_ARCHITECTURES "${arch}")
endforeach()
set(CMAKE_CUDA_RUNTIME_LIBRARY Static)
enable_language(CUDA)
if(CMAKE_CUDA_COMPILER_VERSION VERSION_LESS 12.8)
  message(FATAL_ERROR "nvcc ${CMAKE_CUDA_COMPILER_VERSION} is too old: 12.8 or newer is needed for sm_120")
endif()
