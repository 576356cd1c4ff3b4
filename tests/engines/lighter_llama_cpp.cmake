# llama.cpp with less to compile: included by its own CMakeLists.txt (CMAKE_PROJECT_llama.cpp_INCLUDE).
#
# Two hundred small files, one a model architecture, read the same long headers again and again. They are compiled a
# dozen at a time (a "unity build"); everything else as it stands. The kernels keep -O3, the rest is built with -O1.

function(draftsmith_lighter)
    get_target_property(sources llama SOURCES)
    set(alone ${sources})
    list(FILTER alone INCLUDE REGEX "models/deepseek4\\.cpp$") # names its helpers as glm5-next.cpp does
    list(FILTER sources EXCLUDE REGEX "models/[^/]*\\.cpp$")
    set_source_files_properties(${sources} ${alone} TARGET_DIRECTORY llama PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
    set_target_properties(llama PROPERTIES UNITY_BUILD ON UNITY_BUILD_BATCH_SIZE 12)
    target_compile_options(ggml-cpu PRIVATE -O3)
endfunction()

cmake_language(DEFER DIRECTORY ${CMAKE_SOURCE_DIR} CALL draftsmith_lighter)
