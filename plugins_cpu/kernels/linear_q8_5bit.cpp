// linear_q8 for schemes with 5-bit codes.
#include "linear_q8.h"

namespace castiron {

CASTIRON_KERNEL("linear_q8.q5_0", LinearQ8Params, linear_q8<Q5_0>);
CASTIRON_KERNEL("linear_q8.q5_1", LinearQ8Params, linear_q8<Q5_1>);
CASTIRON_KERNEL("linear_q8.q5_k", LinearQ8Params, linear_q8<Q5_K>);

}  // namespace castiron
