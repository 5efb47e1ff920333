"""What happens, case by case: each test runs for this package and for torch, whose runs must fail where torch is wrong."""
