// Names of policies, as in the configuration.

// Orders of the admission queue (router.order).
export const ORDERS = ["fifo", "deadline", "shortest", "ranked", "hrrn", "attained"];
// Batching policies of the workers (worker.scheduling.policy).
export const ENGINE_POLICIES = ["default", "continuous", "slai", "static", "magnus"];
