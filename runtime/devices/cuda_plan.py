"""Plan records become kernel launches: parameters with addresses in place, and one explicit graph a plan.

Graphs are built node by node from the records, never captured. Consecutive kernels are joined by programmatic
edges: a kernel's prologue overlaps with the end of the one before it, and griddepcontrol.wait orders the rest.
GPUs before compute capability 9.0 don't have them: there every edge is a full one.
"""

from typing import Any

import numpy as np

from castiron.runtime.devices.cuda_driver import check, driver
from castiron.runtime.engine_file import EngineFile
from castiron.runtime.errors import EngineFormatError
from castiron.runtime.plan_format import (
    MemoryClass,
    Plan,
    PlanArrays,
    PlanHeader,
    RecordFlag,
    RelocationKind,
    TensorMap,
)
from castiron.runtime.printable import printable

_PROGRAMMATIC_PORT = 1  # CU_GRAPH_KERNEL_NODE_PORT_PROGRAMMATIC
_PROGRAMMATIC_CAPABILITY = (9, 0)  # the first that has griddepcontrol
_MAP_WORDS = 16
_DOING = "building CUDA graphs"


class LinkedPlans:
    """The plans of one engine with every address in place and every kernel loaded."""

    def __init__(
        self,
        engine_file: EngineFile,
        header: PlanHeader,
        arrays: PlanArrays,
        bases: dict[MemoryClass, int],
        cache_bases: list[int],
    ) -> None:
        """`bases`: device address of each memory class; `cache_bases`: of each cache tensor."""
        self._header = header
        capability = tuple(engine_file.manifest.target.requirements["compute_capability"])
        self._has_programmatic_edges = capability >= _PROGRAMMATIC_CAPABILITY
        self._records = arrays.records
        self._dependencies = arrays.dependencies
        self._params = _link(header, arrays, bases, cache_bases)
        # kernelParams is an array of pointers, here of one: to the by-value struct
        starts = self._params.ctypes.data + arrays.records["params_offset"]
        self._param_pointers = np.ascontiguousarray(starts, np.uint64)
        self._modules: list[Any] = []
        self._functions = self._load_kernels(engine_file)
        self._graphs: list[Any] = []

    def build_graph(self, plan: Plan) -> Any:
        """An executable graph of the plan."""
        indices = list(range(plan.records_start, plan.records_start + plan.records_count))
        return self._instantiate(indices, self._edges(plan))

    def build_chain(self, indices: list[int]) -> Any:
        """An executable graph of just these records, one after another as in a plan: for profiles."""
        chain = [(index - 1, index, True) for index in range(1, len(indices))]
        return self._instantiate(indices, chain)

    def _instantiate(self, indices: list[int], edges: list[tuple[int, int, bool]]) -> Any:
        """`edges`: (from, to, is programmatic) as positions in `indices`."""
        graph = check(driver.cuGraphCreate(0), _DOING)
        try:
            nodes = [self._add_node(graph, index) for index in indices]
            self._add_edges(graph, nodes, edges)
            executable = check(driver.cuGraphInstantiate(graph, 0), _DOING)
        finally:
            driver.cuGraphDestroy(graph)
        self._graphs.append(executable)
        return executable

    def launch_directly(self, plan: Plan, stream: Any) -> None:
        """Launch the plan's kernels one by one, without a graph and without programmatic edges: for comparison."""
        for index in range(plan.records_start, plan.records_start + plan.records_count):
            record = self._records[index]
            config = driver.CUlaunchConfig()
            config.gridDimX, config.gridDimY, config.gridDimZ = map(int, record["grid"])
            config.blockDimX, config.blockDimY, config.blockDimZ = map(int, record["block"])
            config.sharedMemBytes = int(record["shared_bytes"])
            config.hStream = stream
            if tuple(record["cluster"]) > (1, 1, 1):
                attribute = driver.CUlaunchAttribute()
                attribute.id = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
                attribute.value = _with_cluster(driver.CUlaunchAttributeValue(), record["cluster"])
                config.attrs, config.numAttrs = [attribute], 1
            function = self._functions[int(record["kernel"])]
            check(
                driver.cuLaunchKernelEx(config, function, self._params_address(index), 0),
                "launching a kernel",
            )

    def close(self) -> None:
        """Destroy graphs and unload kernels. Calling it twice is fine."""
        for graph in self._graphs:
            driver.cuGraphExecDestroy(graph)
        for module in self._modules:
            driver.cuModuleUnload(module)
        self._graphs, self._modules = [], []

    def _params_address(self, index: int) -> int:
        return int(self._param_pointers.ctypes.data) + 8 * index

    def _load_kernels(self, engine_file: EngineFile) -> list[Any]:
        """The function of every kernel, loaded now so that no launch ever loads anything."""
        most_shared = np.zeros(len(self._header.kernels), np.int64)
        np.maximum.at(most_shared, self._records["kernel"], self._records["shared_bytes"].astype(np.int64))
        functions = []
        modules: dict[str, Any] = {}
        for kernel, shared_bytes in zip(self._header.kernels, most_shared.tolist(), strict=True):
            label = f"{engine_file.path}: kernel {printable(kernel.name)}"
            if kernel.member not in modules:
                error, module = driver.cuModuleLoadData(engine_file.member(kernel.member))
                if error != driver.CUresult.CUDA_SUCCESS:
                    raise EngineFormatError(f"{label} can't be loaded ({error.name}): rebuild the engine")
                modules[kernel.member] = module
                self._modules.append(module)
            error, function = driver.cuModuleGetFunction(modules[kernel.member], kernel.entry.encode())
            if error != driver.CUresult.CUDA_SUCCESS:
                raise EngineFormatError(
                    f"{label} has no function {printable(kernel.entry)} ({error.name}): rebuild the engine"
                )
            if shared_bytes:  # with its static memory a block may pass the 48 KiB it has without asking
                maximum = driver.CUfunction_attribute.CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES
                check(driver.cuFuncSetAttribute(function, maximum, shared_bytes), f"preparing {kernel.name}")
            functions.append(function)
        return functions

    def _add_node(self, graph: Any, index: int) -> Any:
        record = self._records[index]
        params = driver.CUDA_KERNEL_NODE_PARAMS()
        params.func = self._functions[int(record["kernel"])]
        params.gridDimX, params.gridDimY, params.gridDimZ = map(int, record["grid"])
        params.blockDimX, params.blockDimY, params.blockDimZ = map(int, record["block"])
        params.sharedMemBytes = int(record["shared_bytes"])
        params.kernelParams = self._params_address(index)
        node = check(driver.cuGraphAddKernelNode(graph, None, 0, params), _DOING)
        if tuple(record["cluster"]) > (1, 1, 1):
            kind = driver.CUlaunchAttributeID.CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION
            value = _with_cluster(driver.CUkernelNodeAttrValue(), record["cluster"])
            check(driver.cuGraphKernelNodeSetAttribute(node, kind, value), _DOING)
        return node

    def _edges(self, plan: Plan) -> list[tuple[int, int, bool]]:
        """The plan's dependencies, as positions in the plan."""
        edges = []
        for position in range(plan.records_count):
            record = self._records[plan.records_start + position]
            start = int(record["dependencies_start"])
            is_programmatic = bool(int(record["flags"]) & RecordFlag.PDL_IN_EDGE)
            for earlier in self._dependencies[start : start + int(record["dependencies_count"])].tolist():
                edges.append((earlier, position, is_programmatic))
        return edges

    def _add_edges(self, graph: Any, nodes: list[Any], edges: list[tuple[int, int, bool]]) -> None:
        data = []
        for _, _, is_programmatic in edges:
            edge = driver.CUgraphEdgeData()
            if is_programmatic and self._has_programmatic_edges:
                edge.from_port = _PROGRAMMATIC_PORT
                edge.type = driver.CUgraphDependencyType.CU_GRAPH_DEPENDENCY_TYPE_PROGRAMMATIC
            data.append(edge)
        if edges:
            sources = [nodes[earlier] for earlier, _, _ in edges]
            targets = [nodes[later] for _, later, _ in edges]
            check(driver.cuGraphAddDependencies(graph, sources, targets, data, len(edges)), _DOING)


def _with_cluster(value: Any, cluster: np.ndarray) -> Any:
    value.clusterDim.x, value.clusterDim.y, value.clusterDim.z = map(int, cluster)
    return value


def _link(
    header: PlanHeader, arrays: PlanArrays, bases: dict[MemoryClass, int], cache_bases: list[int]
) -> np.ndarray:
    """The parameter blocks (uint64 words) with addresses and tensor maps written into them."""
    params = np.zeros(-(-len(arrays.params) // 8), np.uint64)
    params.view(np.uint8)[: len(arrays.params)] = arrays.params
    relocations = arrays.relocations
    class_bases = np.zeros(len(MemoryClass), np.uint64)
    for memory_class, address in bases.items():
        class_bases[memory_class] = address
    caches = np.array(cache_bases or [0], np.uint64)
    is_cache = relocations["memory_class"] == MemoryClass.CACHE
    target = np.where(is_cache, caches[relocations["target_index"]], class_bases[relocations["memory_class"]])
    addresses = target + relocations["target_offset"]
    blocks = np.repeat(arrays.records["params_offset"], arrays.records["relocations_count"])
    words = ((blocks + relocations["param_offset"]) // 8).astype(np.int64)
    plain = relocations["kind"] == RelocationKind.ADDRESS
    params[words[plain]] = addresses[plain]
    encoded: dict[tuple[int, int], np.ndarray] = {}
    for index in np.flatnonzero(relocations["kind"] == RelocationKind.TENSOR_MAP).tolist():
        key = (int(relocations["tensor_map_index"][index]), int(addresses[index]))
        if key not in encoded:
            encoded[key] = _encode_tensor_map(header.tensor_maps[key[0]], key[1])
        params[words[index] : words[index] + _MAP_WORDS] = encoded[key]
    return params


def _encode_tensor_map(tensor_map: TensorMap, address: int) -> np.ndarray:
    """The 128 bytes of a TMA descriptor, as uint64 [16]. Source: cuTensorMapEncodeTiled of the driver API."""
    types = {
        "bf16": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_BFLOAT16,
        "u8": driver.CUtensorMapDataType.CU_TENSOR_MAP_DATA_TYPE_UINT8,
    }
    swizzles = {"128": driver.CUtensorMapSwizzle.CU_TENSOR_MAP_SWIZZLE_128B}
    if tensor_map.element_type not in types or tensor_map.swizzle not in swizzles:
        raise EngineFormatError(
            f"a tensor map of {printable(tensor_map.element_type)} with swizzle "
            f"{printable(tensor_map.swizzle)} is unknown to this runtime: rebuild the engine"
        )
    encoded = check(
        driver.cuTensorMapEncodeTiled(
            types[tensor_map.element_type],
            len(tensor_map.dims),
            address,
            [driver.cuuint64_t(size) for size in tensor_map.dims],
            [driver.cuuint64_t(stride) for stride in tensor_map.strides_bytes],
            [driver.cuuint32_t(size) for size in tensor_map.box],
            [driver.cuuint32_t(1)] * len(tensor_map.dims),
            driver.CUtensorMapInterleave.CU_TENSOR_MAP_INTERLEAVE_NONE,
            swizzles[tensor_map.swizzle],
            driver.CUtensorMapL2promotion.CU_TENSOR_MAP_L2_PROMOTION_L2_256B,
            driver.CUtensorMapFloatOOBfill.CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE,
        ),
        "encoding a tensor map",
    )
    return np.array([int(word) for word in encoded.opaque], np.uint64)
