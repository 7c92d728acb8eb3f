/* The CUDA driver of the pretend GPU (pretend_gpu.py), preloaded: devices without contexts, functions that do nothing.

   PyTorch's autograd engine asks c10 for devices and contexts, and loads libcuda.so.1, which this library is by its
   soname. */

static int devices = 0;

void pretend_devices(int count) { devices = count; }
signed char _ZN3c104cuda12device_countEv(void) { return (signed char)devices; }
_Bool _ZN3c104cuda17hasPrimaryContextEa(signed char device) { return device < 0; }

int cuDevicePrimaryCtxGetState(int device, unsigned *flags, int *is_active) {
    *flags = 0;
    *is_active = 0;
    return device < 0;
}

#define NOTHING(name) \
    int name() { return 0; }
NOTHING(cuInit)
NOTHING(cuCtxGetCurrent)
NOTHING(cuCtxSetCurrent)
NOTHING(cuDeviceGet)
NOTHING(cuDeviceGetAttribute)
NOTHING(cuDevicePrimaryCtxRetain)
NOTHING(cuFuncGetAttribute)
NOTHING(cuFuncSetAttribute)
NOTHING(cuFuncSetCacheConfig)
NOTHING(cuGetErrorString)
NOTHING(cuLaunchCooperativeKernel)
NOTHING(cuLaunchKernel)
NOTHING(cuLinkAddData_v2)
NOTHING(cuLinkComplete)
NOTHING(cuLinkCreate_v2)
NOTHING(cuModuleGetFunction)
NOTHING(cuModuleLoad)
NOTHING(cuModuleLoadData)
NOTHING(cuModuleLoadDataEx)
NOTHING(cuModuleUnload)
NOTHING(cuOccupancyMaxActiveBlocksPerMultiprocessor)
NOTHING(cuPointerGetAttribute)
NOTHING(cuTensorMapEncodeTiled)
