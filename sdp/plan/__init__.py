"""What a job costs, how long it takes, and whether it fits, before it runs."""
