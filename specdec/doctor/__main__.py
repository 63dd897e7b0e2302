"""`python -m specdec.doctor`."""

import sys

from specdec.doctor.examination import main

sys.exit(main())
