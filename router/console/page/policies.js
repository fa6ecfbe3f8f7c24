// Names as the configuration has them.

// Who leaves the queue first within a class.
export const ORDERS = ["fifo", "deadline", "shortest", "ranked", "hrrn", "attained"];
// Whom a step of the workers is for.
export const ENGINE_POLICIES = ["default", "continuous", "slai", "static", "magnus"];
