"""What is another in each call: random numbers of the host, and clocks; things stand in for what gives them."""
