// Who leaves the queue first within a class, as the router's configuration names it.

export const ORDERS = ["fifo", "deadline", "shortest", "ranked", "hrrn"];
