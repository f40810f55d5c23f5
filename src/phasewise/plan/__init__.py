"""What steps cost, on this machine and on others, and what a cluster would do with a load: profiles and a simulator."""
